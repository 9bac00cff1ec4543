"""`python -m sentinel`: the command line, and how `attach` starts the daemon."""

from sentinel.cli import main

if __name__ == "__main__":
    main()
