"""`python -m forebay`."""

from forebay.cli import main

main()
