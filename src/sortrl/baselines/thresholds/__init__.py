"""Threshold students: pixels compared with thresholds in gaps of the data, and an ordinary network behind them."""
