"""The cleaner service: confirms buffer rows on minions and writes missing cells again (I6)."""
