"""`python -m consumers MODULE --datastore D [--from beginning|end]`: one worker of a trigger program."""

from schemaless.consume.trigger_worker import main

if __name__ == "__main__":
    main()
