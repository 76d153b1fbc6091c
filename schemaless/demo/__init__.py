"""The demo: real flights through the whole system, then the proof that nothing was lost. `schemaless demo` runs it.

dataset   the flights' file, by its hash
flight    one flight as cells
loader    flights through HTTP batch puts
programs  index and trigger programs of the demo
catch_up  waiting for topic, index and triggers
site      the stack that it runs on: the embedded one, or one that runs already
queries   sample questions and their answers
report    what is asserted, line by line
"""
