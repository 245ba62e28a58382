"""`python -m telamon`: the same as `telamon`."""

from telamon.cli.main import main

if __name__ == "__main__":
    main()
