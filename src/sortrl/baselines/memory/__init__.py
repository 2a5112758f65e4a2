"""Nearest-neighbour students: the teacher's best episodes by heart, certified by their distance to each other."""
