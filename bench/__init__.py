"""The benchmark: every figure beside its raw limit or a plain comparator, measured in the same run."""
