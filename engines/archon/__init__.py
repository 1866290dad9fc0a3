"""Parts of ArchonEngine: models of our own in plain torch, every parallel dimension over one device mesh, schedules."""
