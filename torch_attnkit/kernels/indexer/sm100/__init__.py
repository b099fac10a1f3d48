"""An indexer's scores on Blackwell."""
