"""`python -m telamon` is the `telamon` command."""

from telamon.cli.main import main

if __name__ == "__main__":
    main()
