"""The experiments of the paper as data: which runs, which published numbers, and what is concluded from both."""
