"""The page /ui: what open pages are sent, and the files that a browser loads."""
