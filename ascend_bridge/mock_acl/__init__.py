"""A stand-in for the vendor's runtime, for tests: see `mock_acl.h`."""
