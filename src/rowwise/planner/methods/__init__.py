"""Published ways to place tables, one a module; `named` knows all of them."""
