/* Failover of one shard whose home is cluster a, with b1 as the secondary: docs/failover-model.md.
 *
 * A server's history is a list of transactions, the same on every server that has it: cells, and openings by a
 * controller. Nobody waits for anybody: each step may come late or never, so a partition, a lost packet and a stopped
 * process need no state of their own. -DNO_X takes the guard of trap X out.
 *
 * Not expressed: L5 and S4 (what a power cut forgets, and after how long), L6 and L7 (b1 never fails), L8 (a cell has
 * one body), R5 (the shard never moves), K2 (Kafka fences a second tailer).
 */
#define SERVERS 3 /* a1, a2 and a3 are 0, 1 and 2 */
#define B 3       /* b1, the secondary, never fails */
#define NOBODY 3
#define LENGTH 5
#define FIRST 5 /* the rank of the first appointment */

#ifndef CELLS
#define CELLS 2
#endif
#ifndef CONTROLLERS
#define CONTROLLERS 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef RESTARTS
#define RESTARTS 1
#endif
#ifndef RESTORES
#define RESTORES 0
#endif

/* A transaction. A cell is 8 * epoch + number.
 * An opening is 128 + 64 * controller + 8 * epoch + its new generation, or 0. */
byte history[15];    /* SERVERS * LENGTH */
byte executed[3];    /* how many transactions of its history a server shows */
byte received[3];    /* those behind it are in the relay log */
byte generation[3];  /* of the head */
byte added_id[3];    /* of the head */
byte head_epoch[3];
byte source[3];      /* from whom it receives */
#ifdef NO_S3
byte named_source[3]; /* from whom it receives again after a restart */
#endif
bool up[3];
bool is_open[3];     /* read_only is off */
byte promise[3];     /* ballot: 2 * epoch + controller */
byte session[3];     /* the controller that holds the lock, plus 1 */
byte known[4];       /* rank of the appointment: 4 * epoch + 2 * controller + whether it names a new master */
byte master_of[16];  /* by rank */
byte voters_of[16];  /* bits, by rank */
byte new_generation[16]; /* that begins with an appointment, by rank */

bool buffered[3];    /* by cell */
bool acknowledged[3]; /* with two copies, or as buffered */
byte lease[3];       /* by cell, that is by process: 1 fresh, 2 from before the promises, 0 none */
byte named[16];      /* which cell 4 * generation + added_id named first */
byte newest_open = 1; /* highest epoch that was opened */
byte crashes, restarts, restores;

#ifdef BY_HAND
bool confirmed[3], excused[3]; /* by cell */
#define EXCUSED(cell) excused[cell]
#define NOTE_CONFIRMED confirmed[shown] = 1
#else
#define EXCUSED(cell) 0
#define NOTE_CONFIRMED skip
#endif
byte promotions, switches; /* where there is one of each at most */
byte deciding; /* controllers that have begun */

hidden byte i, j, k, found, other; /* used within one step */
hidden byte lacking;

#define AT(n, position) history[(n) * LENGTH + (position)]
#define IS_OPENING(transaction) ((transaction) >= 128)
#define EPOCH(transaction) (((transaction) / 8) % 8)
#define HAS_BIT(bits, n) (((bits) >> (n)) & 1)

/* Computes the head of a server from what it executed. */
inline read_head(whose) {
  generation[whose] = 1; added_id[whose] = 0; head_epoch[whose] = 1;
  for (i : 0 .. executed[whose] - 1) {
    if
    :: IS_OPENING(AT(whose, i)) ->
      head_epoch[whose] = EPOCH(AT(whose, i));
      if
      :: AT(whose, i) % 8 -> generation[whose] = AT(whose, i) % 8
      :: else
      fi
    :: else -> added_id[whose]++
    fi
  }
  i = 0
}

/* found: whether a server shows a cell. */
inline find(whose, wanted) {
  found = 0;
  for (i : 0 .. executed[whose] - 1) {
    if
    :: !IS_OPENING(AT(whose, i)) && AT(whose, i) % 8 == wanted -> found = 1
    :: else
    fi
  }
  i = 0
}

/* lacking: whether my first transactions lack one of their first ones. The first such one is at k. */
inline compare(mine, mine_to, theirs, theirs_to) {
  lacking = 0;
  k = 0;
  for (i : 0 .. theirs_to - 1) {
    found = 0;
    for (j : 0 .. mine_to - 1) {
      if
      :: AT(mine, j) == AT(theirs, i) -> found = 1
      :: else
      fi
    }
    if
    :: !found && !lacking -> lacking = 1; k = i
    :: else
    fi
  }
  i = 0; j = 0; found = 0
}

/* Each acknowledged cell is on the present master, or in the buffer. */
inline check_acknowledged() {
  for (other : 0 .. SERVERS - 1) {
    if
    :: up[other] && is_open[other] && head_epoch[other] == newest_open ->
      for (k : 1 .. CELLS) {
        find(other, k);
        assert(!acknowledged[k] || buffered[k] || found || EXCUSED(k))
      }
    :: else
    fi
  }
  other = 0; k = 0; found = 0
}

/* A cell gets behind the head, once. No location names two cells. */
inline store(at, what) {
  find(at, what);
  if
  :: !found ->
    AT(at, executed[at]) = 8 * head_epoch[at] + what;
    executed[at]++;
    received[at] = executed[at];
    read_head(at);
    assert(named[4 * generation[at] + added_id[at]] == 0 || named[4 * generation[at] + added_id[at]] == what);
    named[4 * generation[at] + added_id[at]] = what;
    printf("a%d stores cell %d at (%d, %d)\n", at + 1, what, generation[at], added_id[at])
  :: else
  fi;
  found = 0
}

/* Whether a server takes a cell of a process that has a view. */
#ifdef NO_M5
#define TAKES(n, view) (up[n] && is_open[n] && executed[n] == received[n])
#else
#define TAKES(n, view) (up[n] && is_open[n] && executed[n] == received[n] && head_epoch[n] == (view) / 4)
#endif

/* A process reads the appointment of one server, and never goes back. */
inline learn(view) {
  atomic {
    if
    :: known[B] > view -> view = known[B]
    :: up[0] && known[0] > view -> view = known[0]
    :: up[1] && known[1] > view -> view = known[1]
    :: up[2] && known[2] > view -> view = known[2]
    fi
  }
}

/* Another server than the master says that it knows no later one. Only those count that are told before an opening. */
#ifdef NO_M4
#define COUNTS(n, view) true
#else
#define COUNTS(n, view) HAS_BIT(voters_of[view], n)
#endif
#define CONFIRMS(n, view) (up[n] && n != master_of[view] && COUNTS(n, view) && known[n] / 4 <= (view) / 4)
#define CONFIRMED(view) (known[B] / 4 <= (view) / 4 || CONFIRMS(0, view) || CONFIRMS(1, view) || CONFIRMS(2, view))

inline take_lease() {
  d_step {
    !is_buffered && lease[cell] != 1 && CONFIRMED(view) ->
    lease[cell] = 1;
    printf("the process of cell %d has a lease of epoch %d\n", cell, view / 4)
  }
}

/* A process that puts one cell: buffer row, home, answer. */
proctype Put(byte cell) {
  byte view = FIRST;
  bool is_buffered, is_stored;
#ifdef NO_M2
  bool had_lease;
#endif
  do
  :: learn(view)
  :: atomic { known[B] / 4 <= view / 4 -> buffered[cell] = 1; is_buffered = 1; printf("b1 buffers cell %d\n", cell) };
    break
#ifdef ONE_COPY
  :: break
#endif
  od;
  do
  :: atomic {
      view < 15 && (known[B] > view || (up[0] && known[0] > view) || (up[1] && known[1] > view) ||
        (up[2] && known[2] > view)) -> lease[cell] = 0; learn(view)
    }
#ifdef ONE_COPY
  :: take_lease()
#endif
  :: d_step {
      TAKES(master_of[view], view) -> store(master_of[view], cell); is_stored = 1;
#ifdef NO_M2
      had_lease = lease[cell] != 0
#endif
    };
    break
  :: is_buffered -> break
  od;
#ifdef NO_M2
#define HAS_LEASE had_lease
#else
#define HAS_LEASE lease[cell]
#endif
  do
  :: d_step {
      is_buffered -> acknowledged[cell] = 1; printf("cell %d is answered\n", cell); check_acknowledged()
    };
    break
  :: take_lease()
  :: d_step {
      !is_buffered && is_stored && HAS_LEASE -> /* one copy: no later master may lack it */
      printf("cell %d is answered with one copy on a%d\n", cell, master_of[view] + 1);
      for (other : 0 .. SERVERS - 1) {
        find(other, cell);
        assert(!(other != master_of[view] && up[other] && is_open[other] && head_epoch[other] == newest_open) || found)
      }
      other = 0; found = 0; lease[cell] = 0
    };
    break
  :: !is_buffered -> break
  od
}

/* A server that shows a cell is of the same epoch. The view names the master of that epoch, which proves nothing. */
#ifdef NO_L4
#define SAME_EPOCH(n) true
#else
#define SAME_EPOCH(n) (head_epoch[n] == view / 4)
#endif
#ifdef NO_L9
#define KNOWS_MASTER true
#else
#define KNOWS_MASTER (view % 2 == 1)
#endif
#ifdef NO_S9
#define VOTES(n) true
#else
#define VOTES(n) HAS_BIT(voters_of[view], n)
#endif
#define PROVES(n) (up[n] && n != master_of[view] && SAME_EPOCH(n) && KNOWS_MASTER && VOTES(n))
#ifdef NO_S8
#define PROVEN_UNDER view
#else
#define PROVEN_UNDER looked
#endif

/* The cleaner: confirms buffer rows on other servers than the master, deletes them, and rescues. */
proctype Cleaner() {
  byte view = FIRST, shown, looked, n, cell;
  do
  :: learn(view)
  :: shown == 0 -> atomic {
      select(n : 0 .. SERVERS - 1);
      select(cell : 1 .. CELLS);
      if
      :: buffered[cell] && PROVES(n) ->
        d_step {
          find(n, cell);
          if
          :: found -> shown = cell; looked = view;
            printf("a%d shows cell %d to the cleaner of epoch %d\n", n + 1, cell, view / 4)
          :: else
          fi;
          found = 0
        }
      :: else
      fi;
      n = 0; cell = 0
    }
  :: d_step {
      shown && known[B] / 4 <= PROVEN_UNDER / 4 ->
      printf("b1 deletes the row of cell %d\n", shown);
      buffered[shown] = 0; NOTE_CONFIRMED; shown = 0; looked = 0; check_acknowledged()
    }
  :: d_step { shown && known[B] / 4 > PROVEN_UNDER / 4 -> shown = 0; looked = 0 }
  od
}

inline at_least(on, new) {
  if
  :: known[on] < new -> known[on] = new
  :: else
  fi
}

#define MASTER master_of[known[B]]
#define MASTER_IS_WELL (known[B] % 2 && up[MASTER] && is_open[MASTER] && head_epoch[MASTER] == known[B] / 4)

#define LAST(n) AT(n, executed[n] - 1)
#if CRASHES > 1 /* the second crash may lose a relay log */
#define HAS(m) executed[m]
#else
#define HAS(m) received[m]
#endif
#define SHOWS_LAST(n, m) (m != n && HAS(m) >= executed[n] && AT(m, executed[n] - 1) == LAST(n))
#define ELSEWHERE(n) (SHOWS_LAST(n, 0) || SHOWS_LAST(n, 1) || SHOWS_LAST(n, 2))
#define IS_VOTER(n) HAS_BIT(voters_of[known[B]], n)
#ifdef NO_S6
#define AGREES(n) true
#else
#define AGREES(n) (!IS_VOTER(n) || (up[n] && promise[n] <= known[B] / 2))
#endif

inline apply(whose) {
  if
  :: IS_OPENING(AT(whose, executed[whose]))
  :: else -> /* a row brings its epoch, and none may come behind the opening of a later one */
    assert(EPOCH(AT(whose, executed[whose])) >= head_epoch[whose])
  fi;
  executed[whose]++;
  read_head(whose);
  printf("a%d applies what it received, and has %d\n", whose + 1, executed[whose])
}
#ifdef RELAY
#define APPLY_AT_ONCE skip
#else
#define APPLY_AT_ONCE apply(n)
#endif

/* A server receives and applies, follows the master (any healthy controller sees to it), crashes and starts again. */
proctype Server(byte n) {
  byte rank;
  do
  :: d_step {
      source[n] != NOBODY && up[n] && up[source[n]] && received[n] < LENGTH ->
      compare(n, received[n], source[n], executed[source[n]]);
      if
      :: lacking -> AT(n, received[n]) = AT(source[n], k); received[n]++;
        printf("a%d receives from a%d\n", n + 1, source[n] + 1);
        APPLY_AT_ONCE
      :: else
      fi;
      lacking = 0; k = 0
    }
#ifdef RELAY
  :: d_step { up[n] && executed[n] < received[n] -> apply(n) }
#endif
  :: d_step {
      crashes < CRASHES && up[n] ->
      up[n] = 0; is_open[n] = 0; session[n] = 0; received[n] = executed[n]; crashes++; printf("a%d crashes\n", n + 1)
    }
  :: d_step {
      restarts < RESTARTS && !up[n] ->
      up[n] = 1;
#ifdef NO_S3
      source[n] = named_source[n];
#else
      source[n] = NOBODY;
#endif
      restarts++; printf("a%d starts again\n", n + 1)
    }
#if RESTORES
  :: d_step { /* from a backup that is older than what another server has */
      restores < RESTORES && !up[n] && executed[n] && ELSEWHERE(n) ->
      executed[n]--; received[n] = executed[n]; AT(n, executed[n]) = 0; read_head(n); restores++;
      printf("a%d is restored and has %d\n", n + 1, executed[n])
    }
#endif
#ifdef HAND
  :: d_step { /* somebody types read_only=0, which takes longer than a lease lasts */
      newest_open > 1 && up[n] && !is_open[n] && source[n] == NOBODY ->
      for (i : 1 .. CELLS) { lease[i] = 0 }
      i = 0;
      is_open[n] = 1; printf("somebody opens a%d\n", n + 1)
    }
#endif
  :: d_step {
      MASTER_IS_WELL && up[n] && !is_open[n] && n != MASTER && (source[n] != MASTER || !IS_VOTER(n)) &&
        promise[n] <= known[B] / 2 &&
        (IS_VOTER(n) || (AGREES(0) && AGREES(1) && AGREES(2))) ->
      compare(MASTER, executed[MASTER], n, executed[n]);
      if
      :: !lacking -> /* a voter before it receives anything */
        rank = known[B];
        voters_of[rank] = voters_of[rank] | (1 << n);
        promise[n] = rank / 2; session[n] = 0; at_least(n, rank);
        received[n] = executed[n]; source[n] = master_of[rank];
        printf("a%d follows a%d\n", n + 1, source[n] + 1);
#ifdef NO_S3
        named_source[n] = source[n];
#endif
        rank = 0
      :: else
      fi;
      lacking = 0; k = 0
    }
  od
}

#ifdef TAILER
/* A tailer publishes from any server. Locations that it published only grow. */
proctype Tailer() {
  byte published = 1, count, n, g, id;
  do
  :: atomic {
      select(n : 0 .. SERVERS - 1);
      if
#ifdef NO_K1
      :: up[n] ->
#else
      :: up[n] && generation[n] >= published ->
#endif
        d_step {
          g = 1; id = 0; found = 0;
          for (i : 0 .. executed[n] - 1) {
            if
            :: found
            :: else ->
              if
              :: IS_OPENING(AT(n, i)) && AT(n, i) % 8 ->
                g = AT(n, i) % 8;
                if
                :: g > published && count >= id -> published = g; count = id; found = 1
                :: else
                fi
              :: IS_OPENING(AT(n, i)) && !(AT(n, i) % 8)
              :: else ->
                id++;
                if
#ifdef NO_K1
                :: id == count + 1 ->
#else
                :: id == count + 1 && g == published ->
#endif
                  assert(g >= published);
                  assert(named[4 * g + id] == AT(n, i) % 8);
                  count = id; found = 1
                :: else
                fi
              fi
            fi
          }
          i = 0; found = 0; g = 0; id = 0
        }
      :: else
      fi;
      n = 0
    }
  od
}
#endif

#ifdef NO_M3
#define MAY(n) up[n]
#define OBEYS(n) up[n]
#else
#define MAY(n) (up[n] && session[n] == me + 1)
#define OBEYS(n) (up[n] && (promise[n] / 2 < epoch || promise[n] == 2 * epoch + me))
#endif
#define ALL_MAY ((!HAS_BIT(heard, 0) || MAY(0)) && (!HAS_BIT(heard, 1) || MAY(1)) && (!HAS_BIT(heard, 2) || MAY(2)))
#define HEARD(n) HAS_BIT(heard, n)

/* Decides from what all servers show that answer. */
inline look() {
  deciding++;
  decided = known[B];
  for (i : 0 .. SERVERS - 1) {
    if
    :: up[i] && known[i] > decided -> decided = known[i]
    :: else
    fi
  }
  i = 0;
  old = master_of[decided];
  voters = voters_of[decided]
}

/* A ballot above all that any server shows. */
inline draw_epoch() {
  epoch = decided / 4;
  for (i : 0 .. SERVERS - 1) {
    if
    :: up[i] && i != silent && promise[i] / 2 > epoch -> epoch = promise[i] / 2
    :: else
    fi;
    if
    :: up[i] && i != silent && known[i] / 4 > epoch -> epoch = known[i] / 4
    :: else
    fi
  }
  if
  :: known[B] / 4 > epoch -> epoch = known[B] / 4
  :: else
  fi;
  epoch++; i = 0
}

/* One server promises, and ends the session of the controller before. */
#ifdef NO_M6
#define DECIDED_LATE(n) false
#elif defined(NO_L2) || defined(BY_HAND)
#define DECIDED_LATE(n) (known[n] > decided)
#else
#define DECIDED_LATE(n) (known[n] > decided || voters_of[decided] != voters)
#endif
inline begin(on) {
  if
  :: OBEYS(on) && !DECIDED_LATE(on) ->
    promise[on] = 2 * epoch + me; session[on] = me + 1; heard = heard | (1 << on);
    printf("a%d promises epoch %d to controller %d\n", on + 1, epoch, me)
  :: else -> goto end
  fi
}

inline append_opening(on, begun) {
  AT(on, executed[on]) = 128 + 64 * me + 8 * epoch + begun;
  executed[on]++;
  received[on] = executed[on];
  read_head(on);
  printf("a%d opens its heads: epoch %d, generation %d\n", on + 1, epoch, generation[on])
}

/* The old master itself goes on, if it was opened: the generation that it was appointed with has begun there. */
#ifdef NO_R8
#define WAS_OPENED true
#else
#define WAS_OPENED (generation[old] >= new_generation[decided])
#endif
#define GOES_ON (chosen == old && WAS_OPENED)

/* Appoints `chosen` on all that were heard. */
inline appoint(begun) {
  d_step {
    ALL_MAY ->
    rank = 4 * epoch + 2 * me + 1;
    master_of[rank] = chosen;
    voters_of[rank] = heard & ~(1 << chosen) & ~(1 << old);
    new_generation[rank] = begun;
    printf("controller %d appoints a%d, voters %d\n", me, chosen + 1, voters_of[rank]);
    for (i : 0 .. SERVERS - 1) {
      if
      :: HEARD(i) -> at_least(i, rank)
      :: else
      fi
    }
    i = 0
  }
}

inline tell_secondary(must_tell) {
  if
  :: d_step { at_least(B, rank); printf("b1 learns of epoch %d\n", epoch) }
  :: !(must_tell) -> skip
  fi
}

#ifdef NO_R1
#define BEGUN (generation[chosen] + 1)
#else
#define BEGUN epoch
#endif

inline open(on) {
  d_step {
    MAY(on) -> is_open[on] = 1; printf("a%d is opened by controller %d\n", on + 1, me);
    if
    :: newest_open < epoch -> newest_open = epoch
    :: else
    fi;
#ifdef BY_HAND /* promoted without a voter: what it alone confirmed before is named to the operator */
    for (k : 1 .. CELLS) {
      excused[k] = confirmed[k]
    }
    k = 0;
#endif
    check_acknowledged()
  }
}

/* One server is lost at a time, and replication caught up in between: what a master opened with is on a voter. */
#ifdef LOST_BEFORE_CAUGHT_UP
#define CAUGHT_UP(n) true
#else
#define OLD_IS_OPENED (decided % 2 == 0 || head_epoch[old] >= decided / 4)
#define CAUGHT_UP(n) (HEARD(old) || (head_epoch[n] >= head_epoch[old] && OLD_IS_OPENED))
#endif

/* A controller makes one change, and may stop at any step for ever. */
proctype Controller(byte me) {
  byte decided, old, voters, epoch, heard, chosen, rank, silent = NOBODY;
  bool is_fenced, goes_on;
  me <= deciding; /* controllers are alike, so the second begins second */
  if
#if defined(REMOVE) || defined(ONE_OF_EACH) /* one promotes, or both remove */
  :: atomic { promotions == 0 -> promotions++; goto promote }
#elif defined(PROMOTE)
  :: goto promote
#endif
#if defined(SWITCH) && defined(ONE_OF_EACH)
  :: atomic { switches == 0 -> switches++; goto switch }
#elif defined(SWITCH)
  :: goto switch
#endif
#ifdef OPEN
  :: goto reopen
#endif
#ifdef REMOVE
  :: goto remove
#endif
  fi;

#ifdef PROMOTE
promote:
  atomic {
    look();
#if defined(NO_L2) || defined(BY_HAND)
    if
    :: skip
    :: voters == 6 && !up[1] -> voters = 4
    :: voters == 6 && !up[2] -> voters = 2
    fi;
#endif
    voters && !(HAS_BIT(voters, 0) && !up[0]) && !(HAS_BIT(voters, 1) && !up[1]) && !(HAS_BIT(voters, 2) && !up[2])
  }
  d_step { draw_epoch() }
  atomic { /* PROMISED */
    skip;
    if :: HAS_BIT(voters, 0) -> begin(0) :: else fi;
    if :: HAS_BIT(voters, 1) -> begin(1) :: else fi;
    if :: HAS_BIT(voters, 2) -> begin(2) :: else fi;
    if
    :: up[old] -> begin(old); is_fenced = 1
    :: skip
    fi
  }
#ifdef NO_M7
  d_step { for (i : 1 .. CELLS) { if :: lease[i] -> lease[i] = 2 :: else fi } i = 0 }
#endif
  /* CLOSED: b1 is told if it answers */
  atomic {
    ALL_MAY ->
    rank = 4 * epoch + 2 * me;
    master_of[rank] = old; voters_of[rank] = voters; new_generation[rank] = new_generation[decided];
    printf("controller %d closes a%d\n", me, old + 1);
    for (i : 0 .. SERVERS - 1) {
      if
      :: HEARD(i) -> at_least(i, rank)
      :: else
      fi
    }
    i = 0;
    if
    :: at_least(B, rank)
    :: skip
    fi
  }
  atomic {
    ALL_MAY -> /* FENCED */
    d_step {
      for (i : 0 .. SERVERS - 1) {
        if
        :: HEARD(i) && i == old -> is_open[i] = 0
#ifndef NO_R2
        :: HEARD(i) && i != old -> source[i] = NOBODY
#endif
        :: else
        fi
      }
      i = 0
    }
    /* CHOSEN */
    select(chosen : 0 .. SERVERS - 1);
    HEARD(chosen) && CAUGHT_UP(chosen);
#ifndef NO_L1
    d_step {
      rank = 1;
      for (other : 0 .. SERVERS - 1) {
        if
        :: HEARD(other) ->
          compare(chosen, received[chosen], other, received[other]);
          if
          :: lacking -> rank = 0
          :: else
          fi
        :: else
        fi
      }
      other = 0; lacking = 0; k = 0
    }
    rank == 1;
#endif
    /* APPLIED, and detached. Others take their turn while it waits. */
    if
    :: chosen != old ->
#ifdef NO_R2
      skip
#else
#ifndef NO_L3
      executed[chosen] == received[chosen];
#endif
      d_step {
        MAY(chosen) ->
#ifdef NO_S3
        named_source[chosen] = NOBODY;
#endif
        source[chosen] = NOBODY; received[chosen] = executed[chosen]
      }
#endif
    :: else
    fi;
#ifdef NO_M7
    d_step { for (i : 1 .. CELLS) { if :: lease[i] == 2 -> lease[i] = 0 :: else fi } i = 0 }
#endif
    goes_on = GOES_ON; is_fenced = is_fenced && WAS_OPENED;
    appoint((goes_on -> 0 : BEGUN))
  }
  tell_secondary(!goes_on);
  d_step {
    MAY(chosen) && executed[chosen] < LENGTH ->
#if !defined(NO_M7) && !defined(NO_M1)
    if /* all who can confirm a lease know: those from before are over */
    :: !goes_on && !is_fenced -> for (i : 1 .. CELLS) { lease[i] = 0 } i = 0
    :: else
    fi;
#endif
    append_opening(chosen, new_generation[rank])
  }
  open(chosen);
  goto end;
#endif

#ifdef SWITCH
switch:
  atomic {
    look();
    up[old] && is_open[old];
    select(chosen : 0 .. SERVERS - 1);
    HAS_BIT(voters, chosen) && up[chosen]
  }
  d_step { draw_epoch() }
  atomic {
    begin(old);
    begin(chosen);
    if :: HAS_BIT(voters, 0) && !HEARD(0) && up[0] -> begin(0) :: else fi;
    if :: HAS_BIT(voters, 1) && !HEARD(1) && up[1] -> begin(1) :: else fi;
    if :: HAS_BIT(voters, 2) && !HEARD(2) && up[2] -> begin(2) :: else fi
  }
  d_step { MAY(old) -> is_open[old] = 0; printf("a%d is fenced by controller %d\n", old + 1, me) }
#ifndef NO_R3
  if
  :: d_step { MAY(old) && MAY(chosen) && executed[chosen] == executed[old] } -> skip
  :: chosen = old; printf("controller %d is late\n", me)
  fi;
#endif
  d_step {
    MAY(chosen) ->
    if
    :: chosen != old -> source[chosen] = NOBODY; received[chosen] = executed[chosen]
    :: else
    fi
  }
  appoint(0);
  tell_secondary(chosen != old);
  d_step { MAY(chosen) && executed[chosen] < LENGTH -> append_opening(chosen, 0) }
  open(chosen);
  goto end;
#endif

#ifdef NO_R7
#define SHOWN(n) executed[n]
#else
#define SHOWN(n) received[n]
#endif
#ifdef OPEN
reopen: /* the appointed master started again: opened under the ballot that it has */
  atomic {
    look();
    epoch = decided / 4;
    chosen = old;
    decided % 2 && up[old] && !is_open[old] && promise[old] / 2 <= epoch;
    promise[old] = decided / 2; session[old] = me + 1; heard = 1 << old
  }
#ifndef NO_R4
  d_step {
    rank = MAY(old);
    for (other : 0 .. SERVERS - 1) {
      if
      :: HAS_BIT(voters, other) && up[other] ->
        compare(old, executed[old], other, SHOWN(other));
        if
        :: lacking -> rank = 0
        :: else
        fi
#ifndef NO_R6
      :: HAS_BIT(voters, other) && !up[other] -> rank = 0
#endif
      :: else
      fi
    }
    other = 0; lacking = 0; k = 0;
#ifdef NO_R6
    if
    :: (!HAS_BIT(voters, 0) || !up[0]) && (!HAS_BIT(voters, 1) || !up[1]) && (!HAS_BIT(voters, 2) || !up[2]) -> rank = 0
    :: else
    fi
#endif
  }
  rank == 1;
#endif
#ifndef NO_M8
  rank = decided;
  tell_secondary(1);
#endif
  d_step {
    MAY(old) && executed[old] < LENGTH ->
    if
    :: head_epoch[old] < epoch -> /* it was appointed, and never opened */
#ifndef NO_M8
      for (i : 1 .. CELLS) { lease[i] = 0 }
      i = 0;
#endif
      AT(old, executed[old]) = 128 + 64 * ((decided / 2) % 2) + 8 * epoch + new_generation[decided];
      executed[old]++; received[old] = executed[old]; read_head(old);
      printf("a%d opens its heads: epoch %d, generation %d\n", old + 1, epoch, generation[old])
    :: else
    fi
  }
  open(old);
  goto end;
#endif

#ifdef REMOVE
remove: /* a voter that this controller doesn't hear, whatever it does, while the master is open */
  atomic {
    look();
    decided % 2 && up[old] && is_open[old];
    select(silent : 0 .. SERVERS - 1);
    HAS_BIT(voters, silent)
  }
  d_step { draw_epoch() }
  atomic {
    begin(old);
    if :: HAS_BIT(voters, 0) && silent != 0 -> begin(0) :: else fi;
    if :: HAS_BIT(voters, 1) && silent != 1 -> begin(1) :: else fi;
    if :: HAS_BIT(voters, 2) && silent != 2 -> begin(2) :: else fi
  }
#ifdef NO_R9
  d_step { MAY(old) -> rank = executed[old] }
#endif
  d_step {
    MAY(old) && executed[old] < LENGTH -> append_opening(old, 0);
    if
    :: newest_open < epoch -> newest_open = epoch
    :: else
    fi;
#ifndef NO_R9
    rank = executed[old];
#endif
    check_acknowledged()
  }
  d_step { /* one that stays has what the master had then, or all stay. So the last voter does. */
    ALL_MAY ->
#ifndef NO_S5
    chosen = 0;
    for (other : 0 .. SERVERS - 1) {
      if
      :: HEARD(other) && other != old ->
        compare(other, executed[other], old, rank);
        if
        :: !lacking -> chosen = 1
        :: else
        fi
      :: else
      fi
    }
    other = 0; lacking = 0; k = 0;
#else
    chosen = 1;
#endif
    rank = 4 * epoch + 2 * me + 1;
    master_of[rank] = old;
    voters_of[rank] = (chosen -> heard & ~(1 << old) : voters);
    new_generation[rank] = new_generation[decided];
    printf("controller %d appoints a%d again, voters %d\n", me, old + 1, voters_of[rank])
  }
  tell_secondary(chosen);
  d_step {
    ALL_MAY ->
    for (i : 0 .. SERVERS - 1) {
      if
      :: HEARD(i) -> at_least(i, rank)
      :: else
      fi
    }
    i = 0
  }
#endif
end:
  skip;
  d_step { decided = 0; old = 0; voters = 0; epoch = 0; heard = 0; chosen = 0; rank = 0; is_fenced = 0; goes_on = 0;
    silent = NOBODY }
}

init {
  d_step {
    for (i : 0 .. SERVERS - 1) {
      up[i] = 1; generation[i] = 1; head_epoch[i] = 1; promise[i] = 2; known[i] = FIRST
    }
    known[B] = FIRST;
    source[0] = NOBODY; is_open[0] = 1;
#ifdef NO_S3
    named_source[0] = NOBODY;
#endif
    master_of[FIRST] = 0; voters_of[FIRST] = 6;
    i = 0
  }
  atomic {
    run Put(1);
#if CELLS > 1
    run Put(2);
#endif
#ifndef NO_CLEANER
    run Cleaner();
#endif
    run Server(0); run Server(1); run Server(2);
    run Controller(0);
#if CONTROLLERS > 1
    run Controller(1);
#endif
#ifdef TAILER
    run Tailer()
#endif
  }
}
