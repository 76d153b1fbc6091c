"""Probe: a synthetic cell now and then, followed on its whole way. docs/operating-the-log.md, "The probe"."""
