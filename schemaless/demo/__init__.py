"""The demo: real flights through the whole system, then the proof that nothing was lost. `schemaless demo` runs it.

flights   the flights' file, fetched by its hash, and a flight as cells
loader    puts flights through HTTP batches
programs  index and trigger programs of the demo
progress  progress on the terminal, and the wait for topic, index and triggers
queries   sample queries and their results
report    what is asserted, line by line
command   the command line's part
run       all of it, on the embedded stack or on one that is already running
"""
