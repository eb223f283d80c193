package registry_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience"
	"github.com/go-resilience/resilience/breaker"
	"github.com/go-resilience/resilience/bulkhead"
	"github.com/go-resilience/resilience/hedge"
	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/throttle"
)

// A fakeConfig has a field of each type that settings support.
type fakeConfig struct {
	Name    string
	Count   int
	Share   float64
	On      bool
	Wait    time.Duration
	Order   order
	Shares  []float64
	Waits   []time.Duration
	Inner   inner
	Pointer *inner
	Label   label
	Length  length
	Chain   chain
	Hook    func()
	Any     any
	promoted
	hidden int //lint:ignore U1000 a settings file cannot set it
}

type promoted struct{ Deep int }

// A chain has no field that a settings file can hold.
type chain struct{ Next *chain }

// A label unmarshals text, but does not marshal it.
type label struct{ text string }

func (l label) String() string { return l.text }
func (l *label) UnmarshalText(text []byte) error {
	l.text = string(text)
	return nil
}

// A length has a text that differs from how fmt prints it.
type length int

func (l length) MarshalText() ([]byte, error) { return fmt.Appendf(nil, "%dm", int(l)), nil }
func (l *length) UnmarshalText(text []byte) error {
	_, err := fmt.Sscanf(string(text), "%dm", (*int)(l))
	return err
}

type inner struct {
	Limit int
	Slow  time.Duration
}

type order int

func (o order) String() string               { return [...]string{"fifo", "lifo"}[o] }
func (o order) MarshalText() ([]byte, error) { return []byte(o.String()), nil }
func (o *order) UnmarshalText(text []byte) error {
	switch string(text) {
	case "fifo":
		*o = 0
	case "lifo":
		*o = 1
	default:
		return fmt.Errorf("is %q: must be fifo or lifo", text)
	}
	return nil
}

func (c fakeConfig) Validate() error {
	var errs []error
	if c.Count < 0 {
		errs = append(errs, fmt.Errorf("fake.Config.Count is %d: must be 0 or more", c.Count))
	}
	if c.Share > 1 {
		errs = append(errs, fmt.Errorf("fake.Config.Share is %v: must be in [0, 1]", c.Share))
	}
	return errors.Join(errs...)
}

// A fake is a policy with a settable Config.
type fake struct {
	name      string
	mu        sync.Mutex
	cfg       fakeConfig
	updates   int
	refuse    error // returned by an Update that is not a dry run
	observers []func(context.Context, policy.Event)
	observing int // observers that have not stopped
}

var _ policy.Describer = (*fake)(nil)

func (f *fake) Describe() policy.Description {
	return policy.Description{
		Kind: "fake",
		Name: f.name,
		Metrics: func() []policy.Metric {
			return []policy.Metric{{Name: "fake.calls{outcome=ok,by=test}", Counter: true, Value: 17}}
		},
		Config:  f.config,
		Update:  f.update,
		Observe: f.observe,
	}
}

func (f *fake) config() any {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cfg
}

func (f *fake) update(dryRun bool, change func(any) error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	cfg := f.cfg
	if err := change(&cfg); err != nil {
		return err
	}
	if err := cfg.Validate(); err != nil || dryRun {
		return err
	}
	if f.refuse != nil {
		return f.refuse
	}
	f.cfg = cfg
	f.updates++
	return nil
}

func (f *fake) observe(o func(context.Context, policy.Event)) (stop func()) {
	f.observing++
	f.observers = append(f.observers, o)
	n := len(f.observers) - 1
	return func() { f.observing--; f.observers[n] = func(context.Context, policy.Event) {} }
}

// notify has an event, whose kind and name the registry fills in.
func (f *fake) notify(e policy.Event) {
	for _, o := range f.observers {
		o(context.Background(), e)
	}
}

func newFakes(names ...string) (*registry.Registry, []*fake) {
	reg := registry.New()
	var all []*fake
	for _, name := range names {
		f := &fake{name: name, cfg: fakeConfig{Name: name, Count: 5, Wait: time.Second, Pointer: &inner{Limit: 3}}}
		reg.MustAdd(f)
		all = append(all, f)
	}
	return reg, all
}

func TestApplySetsFieldsOfEachType(t *testing.T) {
	reg, f := newFakes("users", "orders")
	report, err := reg.Apply([]byte(`{
		"fake/users": {
			"Count": 10, "Share": 0.5, "On": true, "Wait": "1m30s", "Order": "lifo",
			"Shares": [0.1, 0.2], "Waits": ["1s"], "Inner": {"Limit": 7}, "Pointer": {"Slow": "2s"},
			"Label": "<new>", "Length": "7m"
		},
		"?fake/nobody": {"Count": 1}
	}`))
	require.NoError(t, err)
	require.Equal(t, fakeConfig{
		Name: "users", Count: 10, Share: 0.5, On: true, Wait: 90 * time.Second, Order: 1,
		Shares: []float64{0.1, 0.2}, Waits: []time.Duration{time.Second},
		Inner: inner{Limit: 7}, Pointer: &inner{Limit: 3, Slow: 2 * time.Second}, Label: label{"<new>"}, Length: 7,
	}, f[0].cfg)
	require.Equal(t, 1, f[0].updates)
	require.Zero(t, f[1].updates)
	require.Equal(t, slog.String("fake/users.Count", "5 -> 10"), report.LogValue().Group()[0])
	require.Equal(t, `fake/users.Count: 5 -> 10
fake/users.Inner.Limit: 0 -> 7
fake/users.Label: "" -> "<new>"
fake/users.Length: "0m" -> "7m"
fake/users.On: false -> true
fake/users.Order: "fifo" -> "lifo"
fake/users.Pointer: {"Limit": 3, "Slow": "0s"} -> {"Limit": 3, "Slow": "2s"}
fake/users.Share: 0 -> 0.5
fake/users.Shares: null -> [0.1, 0.2]
fake/users.Wait: "1s" -> "1m30s"
fake/users.Waits: null -> ["1s"]`, report.String())

	report, err = reg.Apply([]byte(`{"?fake/users": {"Count": 10, "Pointer": null, "Shares": null}}`))
	require.NoError(t, err)
	require.Len(t, report, 2)
	require.Nil(t, f[0].cfg.Pointer)
	require.Nil(t, f[0].cfg.Shares)
}

func TestSettingsCanBeApplied(t *testing.T) {
	reg, f := newFakes("users", "orders")
	dump := reg.Settings()
	require.Equal(t, `{
  "fake/orders": {
    "Count": 5,
    "Share": 0,
    "On": false,
    "Wait": "1s",
    "Order": "fifo",
    "Shares": null,
    "Waits": null,
    "Inner": {
      "Limit": 0,
      "Slow": "0s"
    },
    "Pointer": {
      "Limit": 3,
      "Slow": "0s"
    },
    "Label": "",
    "Length": "0m"
  },
`, string(dump)[:strings.Index(string(dump), `  "fake/users"`)])
	report, err := reg.Apply(dump)
	require.NoError(t, err)
	require.Empty(t, report)
	require.Zero(t, f[0].updates+f[1].updates, "no policy is updated where nothing changes")

	_, err = reg.Apply([]byte(strings.ReplaceAll(string(dump), `"Count": 5`, `"Count": 6`)))
	require.NoError(t, err)
	require.Equal(t, 6, f[0].cfg.Count)
	require.Equal(t, 6, f[1].cfg.Count)
}

func TestSettingsOmitPoliciesWithoutUpdate(t *testing.T) {
	reg, _ := newFakes("users")
	reg.MustAdd(hedge.New[int](hedge.Config{Name: "users", Delay: time.Second}))
	require.NotContains(t, string(reg.Settings()), "hedge/users")
	_, err := reg.Apply(reg.Settings())
	require.NoError(t, err)
	_, err = reg.Apply([]byte(`{"hedge/users": {"Delay": "2s"}}`))
	require.EqualError(t, err, "hedge/users: has no settings that can change")
}

func TestApplyReportsEveryProblem(t *testing.T) {
	reg, f := newFakes("users", "orders", "tenants", "types")
	_, err := reg.Apply([]byte(`{
		"fake/orders": {"Count": 6},
		"fake/users": {"Hook": null, "Any": 1, "hidden": 1, "Typo": 2, "Name": "other", "Inner": {"Limt": 1}, "count": 1,
			"Pointer": {"Limt": 1}, "Deep": 1, "Chain": {}},
		"fake/tenants": {"Wait": 5, "Share": "much", "Order": "random", "Shares": [1, "x"], "Waits": ["soon"],
			"On": 1, "Count": 1.5},
		"fake/types": {"Count": {"N": 1}, "Label": {"Limit": 1}, "Wait": true},
		"fake/nobody": {}
	}`))
	require.EqualError(t, err, strings.Join([]string{
		`fake/nobody: no such policy is registered`,
		`fake/tenants: Count: cannot parse value as 'int': strconv.ParseInt: parsing "1.5": invalid syntax`,
		`fake/tenants: Share: expected type 'float64', got unconvertible type 'string'`,
		`fake/tenants: On: expected type 'bool', got unconvertible type 'json.Number'`,
		`fake/tenants: Wait: is 5: must be a duration in quotes, such as "1.5s"`,
		`fake/tenants: Order: is "random": must be fifo or lifo`,
		`fake/tenants: Shares[1]: expected type 'float64', got unconvertible type 'string'`,
		`fake/tenants: Waits[0]: is soon: must be a duration in quotes, such as "1.5s"`,
		`fake/types: Count: expected type 'int', got unconvertible type 'map[string]interface {}'`,
		`fake/types: Wait: is true: must be a duration in quotes, such as "1.5s"`,
		`fake/types: Label: is map[Limit:1]: must be a text`,
		`fake/users: Any: file cannot hold a value of type interface {}`,
		`fake/users: Chain: file cannot hold a value of type registry_test.chain`,
		`fake/users: Deep: registry_test.fakeConfig has no such field`,
		`fake/users: Hook: file cannot hold a value of type func()`,
		`fake/users: Inner.Limt: registry_test.inner has no such field`,
		`fake/users: Name: policy cannot change its name`,
		`fake/users: Pointer.Limt: registry_test.inner has no such field`,
		`fake/users: Typo: registry_test.fakeConfig has no such field`,
		`fake/users: count: registry_test.fakeConfig has no such field`,
		`fake/users: hidden: registry_test.fakeConfig has no such field`,
	}, "\n"))
	require.Zero(t, f[0].updates+f[1].updates+f[2].updates+f[3].updates)
}

func TestApplyValidatesAllPoliciesFirst(t *testing.T) {
	reg, f := newFakes("a", "b")
	_, err := reg.Apply([]byte(`{"fake/a": {"Count": 6}, "fake/b": {"Count": -1, "Share": 2}}`))
	require.EqualError(t, err, "fake/b: fake.Config.Count is -1: must be 0 or more\n"+
		"fake/b: fake.Config.Share is 2: must be in [0, 1]")
	require.Zero(t, f[0].updates)
}

// A policy may reject an update after its dry run succeeded.
func TestApplyReportsPolicyThatRejectsUpdate(t *testing.T) {
	reg, f := newFakes("a", "b", "c")
	f[1].refuse = errors.New("too late")
	data := []byte(`{"fake/a": {"Count": 6, "Inner": {"Limit": 9}}, "fake/b": {"Count": 7}, "fake/c": {"Count": 8}}`)
	report, err := reg.Apply(data)
	require.EqualError(t, err, "fake/b: too late")
	require.Equal(t, "fake/a.Count: 5 -> 6\nfake/a.Inner.Limit: 0 -> 9\nfake/c.Count: 5 -> 8", report.String())
	require.Equal(t, 5, f[1].cfg.Count)

	f[1].refuse = nil
	report, err = reg.Preview(data)
	require.NoError(t, err)
	require.Equal(t, "fake/b.Count: 5 -> 7", report.String())
	require.Zero(t, f[1].updates, "a preview changes nothing")
	applied, err := reg.Apply(data)
	require.NoError(t, err)
	require.Equal(t, report, applied)
}

func TestApplyRejectsOptionalDuplicate(t *testing.T) {
	reg, f := newFakes("users")
	for _, twice := range []string{
		`{"fake/users": {"Count": 6}, "?fake/users": {"Count": 7}}`,
		`{"?fake/users": {"Count": 6}, "fake/users": {"Count": 7}}`,
	} {
		_, err := reg.Apply([]byte(twice))
		require.ErrorContains(t, err, ": occurs twice", twice)
	}
	require.Zero(t, f[0].updates)
}

func TestApplyRejectsDuplicateNames(t *testing.T) {
	reg, f := newFakes("users")
	for text, want := range map[string]string{
		`{"fake/users": {"Count": 6}, "fake/users": {"Share": 1}}`:          "fake/users: occurs twice",
		`{"fake/users": {"Share": 1e400, "Share": 1}}`:                      "fake/users.Share: occurs twice",
		`{"fake/users": {"Count": 6, "Waits": ["1s"], "Count": 7}}`:         "fake/users.Count: occurs twice",
		`{"fake/users": {"Shares": [], "Inner": {"Limit": 1, "Limit": 2}}}`: "fake/users.Inner.Limit: occurs twice",
	} {
		_, err := reg.Apply([]byte(text))
		require.EqualError(t, err, want)
	}
	_, err := reg.Apply([]byte(`{"fake/users": {"Inner": {"Limit": 1}, "Pointer": {"Limit": 1}, "Waits": ["1s", "1s"]}}`))
	require.NoError(t, err)
	require.Equal(t, 1, f[0].updates)
}

// A field that is set to its current default no longer follows other fields.
func TestApplyPinsADefault(t *testing.T) {
	reg := registry.New()
	limit := throttle.New(throttle.Config{Name: "a", Rate: 10})
	reg.MustAdd(limit)
	report, err := reg.Apply([]byte(`{"throttle/a": {"Rate": 100, "Burst": 10}}`))
	require.NoError(t, err)
	require.Equal(t, "throttle/a.Rate: 10 -> 100", report.String())
	require.Equal(t, 10, limit.Config().Burst)
	_, err = reg.Apply([]byte(`{"throttle/a": {"Burst": 0}}`))
	require.NoError(t, err)
	report, err = reg.Apply([]byte(`{"throttle/a": {"Burst": 100}}`))
	require.NoError(t, err)
	require.Empty(t, report, "as it is")
	_, err = reg.Apply([]byte(`{"throttle/a": {"Rate": 7}}`))
	require.NoError(t, err)
	require.Equal(t, 100, limit.Config().Burst)
}

// Functions in a Config cannot be compared, and must not count as changes.
func TestApplyWithoutChangeUpdatesNothing(t *testing.T) {
	reg, f := newFakes("users")
	f[0].cfg.Hook = func() {}
	for range 3 {
		_, err := reg.Apply([]byte(`{"fake/users": {"Count": 6, "Shares": [1], "Pointer": {"Limit": 2}}}`))
		require.NoError(t, err)
	}
	require.Equal(t, 1, f[0].updates)
}

// The overflow of a Group may have the settings already when a member does not.
func TestApplyChangesEachMemberOfAGroup(t *testing.T) {
	reg := registry.New()
	slots := resilience.NewGroup(func(tenant string) *bulkhead.Bulkhead {
		return bulkhead.New(bulkhead.Config{Name: "tenants", Limit: cmp.Or(map[string]int{"big": 64}[tenant], 8)})
	}, resilience.GroupConfig{})
	reg.MustAdd(slots)
	for _, tenant := range []string{"big", "other"} {
		require.NoError(t, slots.Do(t.Context(), tenant, func(context.Context) error { return nil }))
	}
	data := []byte(`{"bulkhead/tenants": {"Limit": 8}}`)
	for _, apply := range []func([]byte) (registry.Report, error){reg.Preview, reg.Apply} {
		report, err := apply(data)
		require.NoError(t, err)
		require.Equal(t, "bulkhead/tenants.Limit: 64 -> 8", report.String())
	}
	for tenant, b := range slots.All() {
		require.Equal(t, 8, b.Config().Limit, tenant)
	}
	report, err := reg.Apply(data)
	require.NoError(t, err)
	require.Empty(t, report)
}

func TestPreviewValidatesTheResult(t *testing.T) {
	reg := registry.New()
	reg.MustAdd(throttle.New(throttle.Config{Name: "a", Rate: 10, Burst: 1}))
	_, err := reg.Preview([]byte(`{"throttle/a": {"Levels": 3}}`))
	require.ErrorContains(t, err, "Levels", "which cannot change in flight")
	report, err := reg.Apply([]byte(`{"throttle/a": {"Burst": 0}}`))
	require.NoError(t, err)
	require.Equal(t, "throttle/a.Burst: 1 -> 10", report.String(), "the default")
}

// A serialPolicy counts updates that run at the same time.
type serialPolicy struct {
	fake
	updating, overlaps atomic.Int64
}

func (p *serialPolicy) Describe() policy.Description {
	d := p.fake.Describe()
	d.Update = p.update
	return d
}

func (p *serialPolicy) update(dryRun bool, change func(any) error) error {
	if p.updating.Add(1) > 1 {
		p.overlaps.Add(1)
	}
	defer p.updating.Add(-1)
	for range 10 {
		runtime.Gosched()
	}
	return p.fake.update(dryRun, change)
}

func TestAppliesAreSerialized(t *testing.T) {
	p := &serialPolicy{fake: fake{name: "a"}}
	reg := registry.New()
	reg.MustAdd(p)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := range 200 {
				_, err := reg.Apply(fmt.Appendf(nil, `{"fake/a": {"Count": %d}}`, 1+4*n+i))
				require.NoError(t, err)
			}
		})
	}
	wg.Wait()
	require.Zero(t, p.overlaps.Load())
}

// describer is a policy with this description.
type describer struct{ d policy.Description }

func (d *describer) Describe() policy.Description { return d.d }

// A group may have members with different types of Config.
func TestApplyComparesConfigsOfOneType(t *testing.T) {
	reg := registry.New()
	reg.MustAdd(&describer{policy.Description{
		Kind: "mixed", Name: "a",
		Config: func() any { return &fakeConfig{Count: 6} },
		Update: func(_ bool, change func(any) error) error {
			return errors.Join(change(&fakeConfig{Count: 6}), change(&struct{ Count int }{5}))
		},
	}})
	require.Contains(t, string(reg.Settings()), `"Count": 6`)
	report, err := reg.Apply([]byte(`{"mixed/a": {"Count": 6}}`))
	require.NoError(t, err)
	require.Empty(t, report)
}

// byValue is the name of a policy that is no pointer. Its config cannot be changed.
type byValue string

func (b byValue) Describe() policy.Description {
	return policy.Description{Kind: "k", Name: string(b), Config: func() any { return fakeConfig{} }}
}

func TestPolicyWithoutUpdateAndMembers(t *testing.T) {
	reg := registry.New()
	reg.MustAdd(byValue("n"))
	_, err := reg.Apply([]byte(`{"k/n": {}}`))
	require.ErrorContains(t, err, "k/n")
	e, ok := reg.Get("k", "n")
	require.True(t, ok)
	require.Nil(t, e.Worst(5))
}

func TestDescriptionNeedsOnlyKindAndName(t *testing.T) {
	for _, d := range []policy.Description{
		{},
		{Config: func() any { return inner{} }},
		{Config: func() any { return 7 }, Update: func(bool, func(any) error) error { return nil }},
		{Update: func(bool, func(any) error) error { return nil }},
	} {
		d.Kind, d.Name = "bare", "a"
		reg := registry.New()
		reg.MustAdd(&describer{d})
		defer reg.Observe(func(context.Context, policy.Event) {})()
		e, _ := reg.Get("bare", "a")
		require.Empty(t, e.Metrics())
		require.Equal(t, policy.Health{}, e.Health(t.Context()))
		require.Empty(t, e.Worst(9))
		require.Equal(t, "{}\n", string(reg.Settings()))
		_, err := reg.Apply([]byte(`{"bare/a": {}}`))
		require.EqualError(t, err, "bare/a: has no settings that can change")
	}
}

func TestEntryHasEveryFunction(t *testing.T) {
	reg := registry.New()
	reg.MustAdd(&describer{policy.Description{Kind: "bare", Name: "a"}})
	e, _ := reg.Get("bare", "a")
	v := reflect.ValueOf(e.Description)
	for i := range v.NumField() {
		require.False(t, v.Field(i).IsZero(), v.Type().Field(i).Name)
	}
	require.Nil(t, e.Config())
	require.Nil(t, e.Settings())
	require.EqualError(t, e.Update(false, func(any) error { panic("called") }), "has no settings that can change")
	e.Observe(func(context.Context, policy.Event) { panic("called") })()
	for range e.Members() {
		t.Error("has a member")
	}
	require.False(t, e.InUse())
}

func TestApplySetsQuotas(t *testing.T) {
	reg := registry.New()
	l := throttle.New(throttle.Config{Name: "users", Rate: 10,
		Quotas: []throttle.Quota{{N: 50, Window: throttle.Window{Every: time.Hour}}}})
	g := throttle.NewGroup(throttle.GroupConfig[string]{Config: throttle.Config{Name: "tenants", Rate: 1}})
	reg.MustAdd(l, g)
	report, err := reg.Apply([]byte(`{
		"throttle/users": {"Quotas": [{"N": 1000, "Window": {"Per": "day"}}, {"N": 60, "Window": {"Every": "1h"}}]},
		"throttle/tenants": {"Config": {"Rate": 0, "Burst": 0, "Quotas": [{"N": 5, "Window": {"Per": "month", "From": 15}}]}}
	}`))
	require.NoError(t, err)
	require.Contains(t, report.String(), `throttle/users.Quotas`)
	require.Equal(t, "1000 per day", l.Config().Quotas[0].String())
	require.Equal(t, "60 per 1h0m0s", l.Config().Quotas[1].String())
	require.Equal(t, "5 per month from 15", g.Config().Config.Quotas[0].String())
	_, err = reg.Apply([]byte(`{"throttle/users": {"Quotas": [{"N": 5, "Window": {"Per": "fortnight"}}]}}`))
	require.ErrorContains(t, err, `throttle.Config.Quotas[0].Window.Per is "fortnight"`)
	report, err = reg.Apply(reg.Settings())
	require.NoError(t, err)
	require.Empty(t, report)
}

// A list is replaced as a whole: without its time zone a quota would start again in UTC.
func TestApplyKeepsTheTimeZoneOfAQuota(t *testing.T) {
	tokyo, err := time.LoadLocation("Asia/Tokyo")
	require.NoError(t, err)
	for _, in := range []*time.Location{tokyo, time.Local, nil} {
		name := in.String() // of nil: "UTC"
		synctest.Test(t, func(t *testing.T) {
			reg := registry.New()
			l := throttle.New(throttle.Config{Name: "users",
				Quotas: []throttle.Quota{{N: 10, Window: throttle.Window{Per: throttle.Day, In: in}}}})
			reg.MustAdd(l)
			before, err := l.Admit(t.Context())
			require.NoError(t, err)
			report, err := reg.Apply(bytes.ReplaceAll(reg.Settings(), []byte(`"N": 10`), []byte(`"N": 20`)))
			require.NoError(t, err)
			require.Len(t, report, 1)
			require.Contains(t, report[0].To, fmt.Sprintf(`"In": "%s"`, name))
			after, err := l.Admit(t.Context())
			require.NoError(t, err)
			require.Equal(t, before.Remaining+9, after.Remaining, name)
			require.Equal(t, before.ResetAfter, after.ResetAfter, name)
			require.Equal(t, name, l.Config().Quotas[0].Window.In.String())
		})
	}
	reg := registry.New()
	reg.MustAdd(throttle.New(throttle.Config{Name: "users", Rate: 1}))
	_, err = reg.Apply([]byte(`{"throttle/users": {"Quotas": [{"N": 5, "Window": {"Per": "day", "In": "Mars"}}]}}`))
	require.EqualError(t, err, "throttle/users: Quotas[0].Window.In: unknown time zone Mars")
}

func TestApplyRequiresAnObject(t *testing.T) {
	reg, _ := newFakes("a")
	for data, want := range map[string]string{
		``:                           "registry: settings: must be a JSON object of policies: unexpected end of JSON input",
		`null`:                       "registry: settings: must be a JSON object of policies: is null",
		`[]`:                         "registry: settings: must be a JSON object of policies: json: cannot unmarshal array",
		`{} {}`:                      "must be a JSON object of policies: invalid character '{' after top-level value",
		`{"fake/a": 5}`:              "fake/a: must be an object of settings, not 5",
		`{"fake/a": null}`:           "fake/a: must be an object of settings, not null",
		`{"fake/a": {"Inner": 1}}`:   "fake/a: Inner: expected a map or struct, got \"string\"",
		`{"fake/a": {"Pointer": 1}}`: "fake/a: Pointer: expected a map or struct, got \"string\"",
	} {
		_, err := reg.Apply([]byte(data))
		require.ErrorContains(t, err, want, "%s", data)
	}
}

func FuzzApply(f *testing.F) {
	reg, fakes := newFakes("users")
	f.Add(string(reg.Settings()))
	f.Add(`{"fake/users": {"Count": 7, "Wait": "2s"}, "?fake/x": {}}`)
	f.Add(`{"fake/users": {"Shares": [1, 2], "Pointer": null, "Order": "lifo"}}`)
	f.Add(`{"fake/users": {"Count": -7, "Wait": 2, "Inner": {"Limit": 1e99}}}`)
	f.Fuzz(func(t *testing.T, data string) {
		before := string(reg.Settings())
		updates := fakes[0].updates
		report, err := reg.Apply([]byte(data))
		switch {
		case err != nil:
			require.Equal(t, before, string(reg.Settings()), "half applied")
			require.Empty(t, report)
		case len(report) == 0:
			require.Equal(t, before, string(reg.Settings()))
			require.Equal(t, updates, fakes[0].updates)
		default:
			require.NotEqual(t, before, string(reg.Settings()))
		}
		again, err := reg.Apply(reg.Settings())
		require.NoError(t, err)
		require.Empty(t, again)
	})
}

func TestAddRejectsInvalidPolicies(t *testing.T) {
	reg, f := newFakes("users")
	unnamed, unkind := &fake{}, &describer{policy.Description{Name: "a"}}
	require.EqualError(t, reg.Add(f[0]), "registry: fake/users is already registered")
	require.EqualError(t, reg.Add(unnamed), "registry: *registry_test.fake has no name")
	require.EqualError(t, reg.Add(unkind), "registry: *registry_test.describer has no kind")
	require.EqualError(t, reg.Add(nil), "registry: policy is nil")
	require.EqualError(t, reg.Add((*bulkhead.Bulkhead)(nil)), "registry: policy is nil")
	require.EqualError(t, reg.Add(mapPolicy{}),
		"registry: registry_test.mapPolicy cannot be compared: add a pointer to it")
	require.False(t, reg.Remove(mapPolicy{}))
	require.NoError(t, reg.Add(&mapPolicy{}))
	require.False(t, reg.Remove(&mapPolicy{}), "an equal policy, not the same one")
	require.Panics(t, func() { reg.MustAdd(unkind) })
	require.EqualError(t, reg.Add(unkind, &fake{name: "orders"}, unnamed),
		"registry: *registry_test.describer has no kind\nregistry: *registry_test.fake has no name")
	_, ok := reg.Get("fake", "orders")
	require.True(t, ok, "the other policies are added")
	require.True(t, reg.Remove(f[0]))
	require.False(t, reg.Remove(f[0]))
	require.NoError(t, reg.Add(f[0]))
	var names []string
	for e := range reg.All() {
		names = append(names, e.String())
	}
	require.Equal(t, []string{"fake/orders", "fake/users", "map/a"}, names)
}

// A mapPolicy cannot be compared.
type mapPolicy map[string]int

func (mapPolicy) Describe() policy.Description { return policy.Description{Kind: "map", Name: "a"} }

func TestAllIsASortedSnapshot(t *testing.T) {
	reg := registry.New()
	all := func() (paths []string) {
		for e := range reg.All() {
			paths = append(paths, e.String())
		}
		return paths
	}
	require.Empty(t, all())
	b := breaker.New(breaker.Config{Name: "b"})
	reg.MustAdd(bulkhead.New(bulkhead.Config{Name: "a", Limit: 1}), b)
	require.Equal(t, []string{"breaker/b", "bulkhead/a"}, all())
	before := reg.All()
	reg.MustAdd(breaker.New(breaker.Config{Name: "a"}))
	require.Equal(t, []string{"breaker/a", "breaker/b", "bulkhead/a"}, all())
	require.True(t, reg.Remove(b))
	require.Equal(t, []string{"breaker/a", "bulkhead/a"}, all())
	n := 0
	for range before {
		n++
	}
	require.Equal(t, 2, n, "the policies at the time of the call")
}

func TestStringIsJSONForExpvar(t *testing.T) {
	reg, _ := newFakes("users", `o"rders`)
	require.JSONEq(t, `{
		"fake/users": {"fake.calls{outcome=ok,by=test}": 17},
		"fake/o\"rders": {"fake.calls{outcome=ok,by=test}": 17}
	}`, reg.String())
	require.Equal(t, "{}", registry.New().String())
}

func TestObserveFollowsAddAndRemove(t *testing.T) {
	reg, f := newFakes("a")
	require.Zero(t, f[0].observing, "a registry without observers observes no policy")
	var seen []string
	see := func(_ context.Context, e policy.Event) { seen = append(seen, e.Kind+"/"+e.Name+" "+e.What) }
	stop := reg.Observe(see)
	late := &fake{name: "late"}
	reg.MustAdd(late)
	f[0].notify(policy.Event{What: "changed"})
	late.notify(policy.Event{What: "refused"})
	require.Equal(t, []string{"fake/a changed", "fake/late refused"}, seen)

	second := reg.Observe(func(context.Context, policy.Event) {})
	require.Equal(t, 1, late.observing, "observers share one observation of a policy")
	reg.Remove(late)
	late.notify(policy.Event{What: "refused"})
	require.Len(t, seen, 2)
	stop()
	stop()
	f[0].notify(policy.Event{What: "changed"})
	require.Len(t, seen, 2)
	require.Equal(t, 1, f[0].observing)
	second()
	require.Zero(t, f[0].observing)
	require.True(t, reg.Remove(f[0]))
	require.Zero(t, f[0].observing, "stop was called once")
	require.Zero(t, late.observing)
}

// newLogger returns a logger that writes lines without their time.
func newLogger(lines *strings.Builder) *slog.Logger {
	return slog.New(slog.NewTextHandler(lines, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: withoutTime}))
}

// withoutTime removes the time of a log line.
func withoutTime(_ []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey {
		return slog.Attr{}
	}
	return a
}

// A limitsConfig has fields that accept the constants Unlimited and None, and others.
type limitsConfig struct {
	Attempts int
	Ratio    float64
	MaxWait  time.Duration
	Pointer  *int
	Inner    struct{ Queue int }
	Quotas   []struct{ N int }
	Offsets  []int // elements are no fields
	Bytes    int64 // another type
	Strict   int   // refuses -1
}

func (c limitsConfig) Validate() error {
	if c.Strict < 0 {
		return fmt.Errorf("limits.Config.Strict is %d: must be 0 or more", c.Strict)
	}
	return nil
}

// newLimits returns a registry with a policy whose Config is cfg.
func newLimits(cfg *limitsConfig) *registry.Registry {
	reg := registry.New()
	reg.MustAdd(&describer{policy.Description{
		Kind: "limits", Name: "a",
		Config: func() any { return *cfg },
		Update: func(dryRun bool, change func(any) error) error {
			next := *cfg
			err := errors.Join(change(&next), next.Validate())
			if err == nil && !dryRun {
				*cfg = next
			}
			return err
		},
	}})
	return reg
}

func TestConstantsAreText(t *testing.T) {
	const unlimited, none = -1, -1 << 31
	var cfg limitsConfig
	reg := newLimits(&cfg)
	all := `{"limits/a": {"Attempts": "unlimited", "Ratio": "none", "MaxWait": "unlimited", "Pointer": "none",
		"Inner": {"Queue": "unlimited"}, "Quotas": [{"N": "none"}], "Offsets": [-1], "Bytes": -1}}`
	preview, err := reg.Preview([]byte(all))
	require.NoError(t, err)
	report, err := reg.Apply([]byte(all))
	require.NoError(t, err)
	require.Equal(t, preview, report)
	n := none
	want := limitsConfig{Attempts: unlimited, Ratio: none, MaxWait: unlimited, Pointer: &n, Offsets: []int{-1}, Bytes: -1}
	want.Inner.Queue = unlimited
	want.Quotas = []struct{ N int }{{none}}
	require.Equal(t, want, cfg)
	require.Equal(t, `limits/a.Attempts: 0 -> "unlimited"
limits/a.Bytes: 0 -> -1
limits/a.Inner.Queue: 0 -> "unlimited"
limits/a.MaxWait: "0s" -> "unlimited"
limits/a.Offsets: null -> [-1]
limits/a.Pointer: null -> "none"
limits/a.Quotas: null -> [{"N": "none"}]
limits/a.Ratio: 0 -> "none"`, report.String())
	require.JSONEq(t, `{"limits/a": {"Attempts": "unlimited", "Ratio": "none", "MaxWait": "unlimited", "Pointer": "none",
		"Inner": {"Queue": "unlimited"}, "Quotas": [{"N": "none"}], "Offsets": [-1], "Bytes": -1, "Strict": 0}}`,
		string(reg.Settings()))
	report, err = reg.Apply(reg.Settings())
	require.NoError(t, err)
	require.Empty(t, report)

	// As numbers they are the same values.
	_, err = reg.Apply([]byte(`{"limits/a": {"Attempts": -2147483648, "Ratio": -1, "MaxWait": "-1ns"}}`))
	require.NoError(t, err)
	require.Equal(t, limitsConfig{Attempts: none, Ratio: unlimited, MaxWait: unlimited},
		limitsConfig{Attempts: cfg.Attempts, Ratio: cfg.Ratio, MaxWait: cfg.MaxWait})
	report, err = reg.Apply([]byte(`{"limits/a": {"Attempts": 3, "Ratio": null, "MaxWait": "0s"}}`))
	require.NoError(t, err)
	again, err := reg.Apply([]byte(`{"limits/a": {"MaxWait": 0}}`))
	require.NoError(t, err, "zero needs no unit")
	require.Empty(t, again)
	require.Equal(t, `limits/a.Attempts: "none" -> 3
limits/a.MaxWait: "unlimited" -> "0s"
limits/a.Ratio: "unlimited" -> 0`, report.String())
}

func TestConstantsAreValidated(t *testing.T) {
	var cfg limitsConfig
	reg := newLimits(&cfg)
	for text, want := range map[string]string{
		`{"Strict": "unlimited"}`: "limits/a: limits.Config.Strict is -1: must be 0 or more",
		`{"Strict": "none"}`:      "limits/a: limits.Config.Strict is -2147483648: must be 0 or more",
		`{"Strict": "Unlimited"}`: "limits/a: Strict: expected type 'int', got unconvertible type 'string'",
		`{"MaxWait": "None"}`:     `limits/a: MaxWait: is None: must be a duration in quotes, such as "1.5s"`,
		`{"Bytes": "unlimited"}`:  "limits/a: Bytes: expected type 'int64', got unconvertible type 'string'",
	} {
		_, err := reg.Apply([]byte(`{"limits/a": ` + text + `}`))
		require.EqualError(t, err, want)
	}
	require.Equal(t, limitsConfig{}, cfg)
}

// The constants of the policies are those that settings know.
func TestConstantsOfPolicies(t *testing.T) {
	slots := bulkhead.New(bulkhead.Config{Name: "a", Limit: 1, Queue: 1, MaxWait: -1})
	reg := registry.New()
	reg.MustAdd(slots)
	require.Contains(t, string(reg.Settings()), `"MaxWait": "unlimited"`)
	report, err := reg.Apply([]byte(`{"bulkhead/a": {"MaxWait": "1s"}}`))
	require.NoError(t, err)
	require.Equal(t, `bulkhead/a.MaxWait: "unlimited" -> "1s"`, report.String())
	_, err = reg.Apply([]byte(`{"bulkhead/a": {"MaxWait": "unlimited"}}`))
	require.NoError(t, err)
	require.EqualValues(t, -1, slots.Config().MaxWait)
	_, err = reg.Apply([]byte(`{"bulkhead/a": {"Limit": "unlimited"}}`))
	require.ErrorContains(t, err, "bulkhead/a: bulkhead.Config.Limit is -1")
}

// A number that does not fit in its field must not become another number.
func TestApplyRejectsNumbersOutOfRange(t *testing.T) {
	type config struct {
		Int32   int32
		Uint8   uint8
		Float32 []float32
		Int     int
	}
	var cfg config
	reg := registry.New()
	reg.MustAdd(&describer{policy.Description{
		Kind: "small", Name: "a",
		Config: func() any { return cfg },
		Update: func(_ bool, change func(any) error) error { return change(&cfg) },
	}})
	_, err := reg.Apply([]byte(`{"small/a": {"Int32": 5000000000, "Uint8": 256, "Float32": [1e39],
		"Int": 9223372036854775808}}`))
	require.EqualError(t, err, `small/a: Int32: is 5000000000: must be in the range of int32
small/a: Uint8: is 256: must be in the range of uint8
small/a: Float32[0]: is 1e39: must be in the range of float32
small/a: Int: is 9223372036854775808: must be in the range of int`)
	_, err = reg.Apply([]byte(`{"small/a": {"Int32": -2147483648, "Uint8": 255, "Float32": [3e38]}}`))
	require.NoError(t, err)
	require.Equal(t, config{Int32: -2147483648, Uint8: 255, Float32: []float32{3e38}}, cfg)
}
