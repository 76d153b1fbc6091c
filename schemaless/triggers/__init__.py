"""What a trigger program is written with: the decorator, the context, verdicts, retry policies, effects once."""
