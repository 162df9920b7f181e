"""Who waits, in what order, and for how long: bounded, fair between keys, with a deadline for each."""
