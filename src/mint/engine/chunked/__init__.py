"""A decoder whose layers are cut into fixed chunks, so that several processes can hold a part of each layer."""
