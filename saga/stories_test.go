package saga

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	store "github.com/go-resilience/resilience/saga/sagastore"
)

var update = flag.Bool("update", false, "rewrite testdata/stories.txt")

// TestStories plays the stories of testdata/stories.txt: each line has an event and the result of the machine.
// Review the changes after -update.
func TestStories(t *testing.T) {
	const file = "testdata/stories.txt"
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var all []string
	for told := range strings.SplitSeq(strings.TrimSpace(string(text)), "\n\n") {
		name, lines, _ := strings.Cut(told, "\n")
		if !strings.HasPrefix(name, "# ") {
			all = append(all, told) // the legend
			continue
		}
		t.Run(name[2:], func(t *testing.T) {
			again := name + "\n" + retell(t, lines)
			all = append(all, again)
			if !*update {
				require.Equal(t, told, again)
			}
		})
	}
	if *update && !t.Failed() {
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(all, "\n\n")+"\n"), 0o644))
	}
}

// retell plays a story and returns its lines with the results of the machine.
func retell(t *testing.T, story string) string {
	lines := strings.Split(story, "\n")
	s := &teller{T: t, now: now, runs: map[string]store.Op{}}
	s.plan, s.m = parse(t, lines[0])
	for i, line := range lines[1:] {
		event, _, _ := strings.Cut(line, " | ")
		event = strings.TrimSpace(event)
		lines[i+1] = fmt.Sprintf("%-24s | %s", event, s.tell(event))
	}
	return strings.Join(lines, "\n")
}

// parse reads the steps of a story, separated by ";". Each has its options after its name.
func parse(t *testing.T, line string) (*program, *machine) {
	d := shapes{Name: "trip", Version: 1}
	var by time.Time
	quiet := false
	for text := range strings.SplitSeq(line, ";") {
		words := strings.Fields(text)
		s := doable(words[0])
		for _, w := range words[1:] {
			key, value, _ := strings.Cut(w, "=")
			long, _ := time.ParseDuration(value)
			switch key {
			case "pivot":
				s.Pivot = true
			case "final":
				s.Undo = false
			case "reads":
				s.ReadOnly, s.Undo = true, false
			case "tx":
				s.Do, s.Undo, s.DoTx, s.UndoTx = false, false, true, true
			case "child":
				s.Do, s.Undo, s.Child, s.ChildOf = false, false, true, true
			case "gate":
				s.Do, s.Undo = false, false
			case "beside":
				s.Parallel = true
			case "delay":
				s.Delay = long
			case "await":
				s.Await = value
			case "for":
				s.AwaitFor = long
			case "tries":
				fmt.Sscan(value, &s.Attempts)
				s.UndoAttempts = s.Attempts
			case "timeout":
				s.Timeout = long
			case "by":
				by = now.Add(long)
			case "quiet":
				quiet = true
			default:
				t.Fatal("no such option: ", w)
			}
		}
		d.Steps = append(d.Steps, s)
	}
	p, err := newPlan(&d)
	require.NoError(t, err)
	m := newMachine(p)
	m.CompleteBy, m.quiet, m.carried = by, quiet, "baggage"
	return p, m
}

// A teller plays one story.
type teller struct {
	*testing.T
	plan *program
	m    *machine
	rec  store.Record
	told int // entries of the log
	now  time.Time
	runs map[string]store.Op // the running attempts, by step
}

// tell applies events and returns their results.
func (s *teller) tell(events string) string {
	var said []string
	say := func(format string, args ...any) { said = append(said, fmt.Sprintf(format, args...)) }
	before := s.m.clone()
	was := before.encode()
	for event := range strings.SplitSeq(events, " & ") {
		words := strings.Fields(event)
		if long, err := time.ParseDuration(words[0]); err == nil {
			s.now, words = s.now.Add(long), words[1:]
		}
		if len(words) == 0 {
			continue
		}
		if err := s.happen(words); err != nil {
			say("no: %v", err)
		}
	}
	m := s.m
	m.advance(s.now)
	require.Equal(s, was, before.encode(), "of a clone")
	for _, e := range m.log[min(s.told, len(m.log)):] {
		said = append(said, entry(e))
	}
	s.told = len(m.log)
	if m.changed {
		say("write")
		s.commit()
	}
	for i := m.next(0, s.now); i >= 0 && m.going(); i = m.next(i+1, s.now) {
		op, attempt := m.op(i), m.begin(i)
		s.runs[m.Steps[i].Name] = op
		say("begin %s %s %d", op, m.Steps[i].Name, attempt)
	}
	in := func(what string, at time.Time, ok bool) {
		if ok {
			say("%s %v", what, at.Sub(s.now))
		}
	}
	at, ok := m.wake(s.now, false)
	in("wake", at, ok)
	if alarm, is := m.wake(s.now, true); alarm != at || is != ok {
		in("alarm", alarm, is)
	}
	if by, is := m.deadline(s.now); by != at {
		in("by", by, is)
	}
	for i := range m.Steps {
		if m.turns(s.now) && m.useless(i) {
			say("%s is of no use", m.Steps[i].Name)
		}
	}
	if c := m.commit(); c.Failures+c.Takeovers > 0 {
		say("%d failures, %d takeovers (%s)", c.Failures, c.Takeovers, c.LastError)
	}
	if m.pivotAwaitsAnswer() {
		say("undecided")
	}
	if m.busy() > 0 && m.onOutside(s.now) {
		say("waits for more")
	}
	if c := m.clone(); c.going() {
		if e, wakeIn, ok := c.release(s.now, false, 6*time.Minute); ok {
			say("%s for %v", entry(e), wakeIn)
		}
	} else if m.Status != store.Completed {
		say("%s at %q (%v)", m.Status, m.Step, m.Cause)
	}
	return strings.Join(said, ", ") + " [" + strings.Join(short(m), "; ") + "]"
}

// happen passes an event to the machine.
func (s *teller) happen(event []string) error {
	m, note := s.m, strings.Join(event[1:], " ")
	switch event[0] {
	case "go": // nothing happens
	case "cancel":
		if !m.cancel(note) {
			return errors.New("no news")
		}
	case "create":
		m.advance(time.Time{})
		s.commit()
		s.load()
	case "taken": // taken over by another runner
		s.rec.Takeovers++
		s.load()
		s.m.takeOver("another")
	case "skip":
		return m.skip(event[1], "by hand")
	case "retry":
		m.retry("again")
	case "compensate":
		return m.compensate(note)
	case "revert":
		m.revert(note)
	case "forestall":
		m.forestall(note)
	case "wish":
		m.wishBack(event[1], errors.New("ctx ended"))
	case "stick":
		m.stick("", errors.New(note))
	case "signals":
		signals := map[string][]byte{}
		for _, name := range event[1:] {
			signals[name] = nil
		}
		m.signals = signals
	case "hang": // an attempt has not returned a lease after its timeout
		attempt, err := strconv.Atoi(event[2])
		require.NoError(s, err)
		m.hang(event[1], attempt)
	case "look":
		m.lookAgain()
	case "reload": // by another runner, after this one has released it
		m.doubt(false)
		s.commit()
		was := s.rec
		s.load()
		s.commit()
		require.Equal(s, was, s.rec)
	default:
		op := s.runs[event[0]]
		require.NotEmpty(s, op, "no attempt of %s runs: %v", event[0], event)
		delete(s.runs, event[0])
		s.end(slices.IndexFunc(s.plan.steps, func(st step) bool { return st.name == event[0] }), op, event[1:])
	}
	return nil
}

// end ends an attempt.
func (s *teller) end(i int, op store.Op, how []string) {
	st := &s.plan.steps[i]
	u := &s.m.Steps[i]
	a := Answer{
		Step: st.name, Op: op, Number: s.m.work[i].number, Outcome: OutcomeMaybeApplied, Error: st.name + " broke",
		RetryAfter: st.backoff(*u.attempts(op)),
	}
	cut := false
	for _, word := range how {
		switch word {
		case "ok":
			a.Outcome, a.Error = OutcomeDone, ""
		case "fails":
		case "clean", "nothing":
			a.Outcome = OutcomeFailed
		case "declined":
			a.Outcome = OutcomeDeclined
		case "final":
			a.Final = true
		case "refused":
			a.Outcome, a.refused = OutcomeRefused, true
			a.RetryAfter = st.backoff(*u.attempts(op) + u.Refusals)
		case "cut":
			cut = true
		case "waits":
			a.waits, a.children, a.RetryAfter = true, 2, 10*time.Second
		default:
			s.Fatal("no such end: ", word)
		}
	}
	if cut {
		a.Outcome, a.RetryAfter = OutcomeInterrupted, 0
	}
	s.m.take(a, &Input{Now: s.now})
}

func (s *teller) commit() {
	c := s.m.commit()
	s.rec = store.Record{
		Now:    s.now,
		Status: c.Status, Progress: c.Progress, Failures: c.Failures, Takeovers: c.Takeovers, LastError: c.LastError,
		CreatedAt: now, CompleteBy: s.m.CompleteBy,
	}
	s.m.log, s.m.changed = nil, false
	s.told = 0
}

func (s *teller) load() {
	s.rec.Now = s.now
	m, err := load(s.plan, &s.rec)
	require.NoError(s, err)
	s.m = m
	clear(s.runs)
}

func entry(e store.Entry) string {
	var words []string
	for _, w := range []string{string(e.Kind), string(e.Op), e.Step} {
		if w != "" {
			words = append(words, w)
		}
	}
	if e.Attempt > 0 {
		words = append(words, fmt.Sprint(e.Attempt))
	}
	if e.Error != "" {
		words = append(words, "("+e.Error+")")
	}
	return strings.Join(words, " ")
}

// short returns the status of each step, with "?" if its outcome is unknown, and the wait.
func short(m *machine) (list []string) {
	for i := range m.Steps {
		u := &m.Steps[i]
		s := string(u.Status)
		if u.MaybeApplied {
			s += "?"
		}
		if !u.NotBefore.IsZero() {
			s += " until " + u.NotBefore.Sub(now).String()
		}
		if !u.WaitingSince.IsZero() {
			s += " since " + u.WaitingSince.Sub(now).String()
		}
		if u.Refusals > 0 {
			s += fmt.Sprintf(" refused %d", u.Refusals)
		}
		list = append(list, s)
	}
	return list
}
