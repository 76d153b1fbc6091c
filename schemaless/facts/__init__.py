"""Facts: what is so, read from every server and added up. It changes nothing, and shows nothing to people."""
