"""Workers that train a store's plans: on this machine and on clusters."""
