"""The commands of `paravt` that fill a module of their own, and what commands share."""
