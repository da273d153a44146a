"""`python -m anaphora`."""

from anaphora.cli.main import main

if __name__ == "__main__":
    main()
