"""The executor of a pool outside of XLA memory: C++, and the check of its ACL."""
