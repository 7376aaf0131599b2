from .assertions import assert_parity as assert_parity
