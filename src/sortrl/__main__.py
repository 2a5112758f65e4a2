"""``python -m sortrl``."""

from sortrl.cli import main

main()
