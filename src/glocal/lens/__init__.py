"""The lens: instruments that show why a run forgets. Each measures one definition or theorem of the paper."""
