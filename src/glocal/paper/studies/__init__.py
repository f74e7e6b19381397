"""The paper's experiments besides Table 1."""
