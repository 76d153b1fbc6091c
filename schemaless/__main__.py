"""`python -m schemaless`: the command line where its script is not on the path."""

from schemaless.cli.main import main

if __name__ == "__main__":
    main()
