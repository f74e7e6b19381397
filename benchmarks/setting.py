"""What every contender does alike. Imported in three environments, so it imports nothing."""

THREADS = 2
WIDTHS = (784, 100, 100, 10)
BATCH = 128
TASKS = 2
"""The first is learnt to fill the memory, the second is timed."""
CHALLENGE = "rotated-digits"
LEARNING_RATE = 0.05
LEARNING_RATES = (0.01, 0.02, 0.05, 0.1, 0.2)
SEEDS = (0, 1, 2, 3, 4)
RUNS = len(SEEDS) * len(LEARNING_RATES)

ALGORITHMS = ("sgd", "er", "ewc", "agem")
RESERVOIR = 500
"""Examples that er stores."""
STORED_PER_TASK = 256
"""Examples of each task that agem stores: two whole replay batches, so that everybody's reference has BATCH rows."""
EWC_PENALTY = 0.7

SECONDS = 1.0
"""A measurement is made of whole epochs, as many as fill this time: the first steps after others have worked are
slower, and training is long."""
ROUNDS = 10
