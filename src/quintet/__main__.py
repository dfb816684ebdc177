"""`python -m quintet`."""

from quintet.cli.main import main

main()
