"""MegatronEngine: Megatron-Core behind the engines' API."""
