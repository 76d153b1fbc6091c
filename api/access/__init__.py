"""Who may do what (I17): the tokens that a process knows, and the one place where requests are admitted."""
