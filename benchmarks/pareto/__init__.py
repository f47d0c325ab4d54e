"""Loss against bytes: every method with its optimizer, at equally tuned learning rates."""
