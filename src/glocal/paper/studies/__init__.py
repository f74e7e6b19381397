"""The paper's experiments besides Table 1; `glocal.paper.experiments` lists them."""
