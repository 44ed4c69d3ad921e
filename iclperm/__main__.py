"""``python -m iclperm``: the command line, where no script is on the path."""

from iclperm.cli.main import main

if __name__ == "__main__":
    main()
