"""The router's study in virtual time: the product's own choice, ledger, charges, reports and step plans on computed engines."""
