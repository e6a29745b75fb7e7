"""Published methods of placing tables, one per module; `named` lists them."""
