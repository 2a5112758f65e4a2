"""Policies to compare SortRL with. Each folder is one method; nothing below this layer knows of them."""
