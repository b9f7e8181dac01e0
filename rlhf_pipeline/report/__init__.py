"""Reports on run folders: curves, pages, and stored rewards graded again. Nothing here imports torch."""
