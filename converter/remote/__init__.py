"""Checkpoints that lie elsewhere: on the Hub, in a bucket, behind a web server.

A remote checkpoint is a local directory of sparse files whose bytes arrive when they are asked for (`mirror`), so that
every reader of headers works on it as on any directory; the bytes of tensors are fetched into memory, in few large
requests, and never touch the disk (`fetch`, `windows`). What speaks to whom stands behind one Protocol (`store`).
"""
