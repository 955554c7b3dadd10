"""cachecraft_lab: check, explore and extend KV cache eviction policies (CacheCraft, arXiv:2608.14555)."""

__version__ = "0.1.0"
