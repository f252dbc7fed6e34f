"""Long studies in the background: started once, paused and continued at will, at the lowest priority."""
