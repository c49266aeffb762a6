"""What `paravt.video` stands on: containers, indexes, decoding, and the process that does it."""
