"""glocal: a continual-learning laboratory built on one idea: what is not seen any more must be approximated."""

import os

# Before the first product: matrix products that round the same alone and in a batch, so that a run does not depend on
# its cohort. A user's own setting stands.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
