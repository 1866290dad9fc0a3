"""What engines are fed with: samples, packed batches, micro-batches, and the position in the data."""
