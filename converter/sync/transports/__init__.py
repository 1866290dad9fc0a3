"""Ways for a push that are no collectives: shared memory, directories, changed blocks only, adapters only."""
