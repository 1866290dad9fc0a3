"""FSDPEngine: transformers' models on FSDP2, with tensor and Ulysses sequence parallelism."""
