package resilienceotel_test

import (
	"database/sql"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-resilience/resilience/policy"
	"github.com/go-resilience/resilience/registry"
	"github.com/go-resilience/resilience/resiliencesql"
)

// values has the values of an attribute. It is empty if any value is possible.
type values map[string]bool

// namesOf returns the attributes of each metric of a registry, by the metric's name without attributes, such as
// "breaker.failure_ratio".
func namesOf(t *testing.T) map[string]map[string]values {
	reg := registry.New()
	reg.MustAdd(everyKind()...)
	reg.MustAdd(resiliencesql.Pool("users", new(sql.DB)))
	all := map[string]map[string]values{}
	add := func(m policy.Metric) {
		name, _, _ := strings.Cut(m.Name, "{")
		if m.Counter {
			name += " counter"
		}
		if all[name] == nil {
			all[name] = map[string]values{"name": {}, "key": {}}
		}
		_, _, attrs := m.Parse()
		for _, a := range attrs {
			if all[name][a.Key] == nil {
				all[name][a.Key] = values{}
			}
			all[name][a.Key][a.Value] = true
		}
	}
	for e := range reg.All() {
		for _, m := range e.Metrics() {
			add(m)
		}
	}
	for _, name := range []string{ // of sagas in a store
		"saga.stored{status=running}", "saga.stored{status=compensating}", "saga.stored{status=stuck}", "saga.due",
		"saga.due.age_seconds",
	} {
		add(policy.Metric{Name: name})
		base, _, _ := strings.Cut(name, "{")
		all[base]["saga"] = values{}
	}
	all["saga.step.attempts counter"]["saga"], all["saga.sagas counter"]["saga"] = values{}, values{}
	return all
}

// inPrometheus returns the attributes of each metric by its name in Prometheus, including histograms.
func inPrometheus(t *testing.T) map[string]map[string]values {
	all := map[string]map[string]values{}
	for name, attrs := range namesOf(t) {
		name = strings.ReplaceAll(strings.ReplaceAll(name, " counter", "_total"), ".", "_")
		all["resilience_"+name], all["resilience_member_"+name] = attrs, attrs
	}
	// The package comment lists the histograms with their attributes.
	histogram := regexp.MustCompile(`(?m)^//\t(resilience(?:\.[a-z]+)+) +([a-z][a-z, ]*?)  `)
	doc := readDoc(t, "doc.go")
	found := histogram.FindAllStringSubmatch(doc, -1)
	require.Len(t, found, 6)
	found = append(found, []string{"", "resilience.call.duration", "outcome"},
		[]string{"", "resilience.attempt.duration", "outcome"})
	for _, m := range found {
		name := strings.ReplaceAll(m[1], ".", "_")
		if strings.HasSuffix(name, "_duration") {
			name += "_seconds"
		}
		attrs := map[string]values{"name": {}}
		for _, key := range strings.Split(m[2], ", ") {
			attrs[key] = values{}
		}
		for _, suffix := range []string{"_bucket", "_sum", "_count"} {
			all[name+suffix] = attrs
		}
	}
	return all
}

var (
	selector = regexp.MustCompile(`(resilience_\w+)?\{([^{}]*)\}`)
	matcher  = regexp.MustCompile(`(\w+)(=~|!~|!=|=)"([^"]*)"`)
	words    = regexp.MustCompile(`\bresilience_\w+`)
)

// checkQuery checks the metrics, the attributes and the attributes' values in a PromQL query.
func checkQuery(t *testing.T, known map[string]map[string]values, query string) {
	t.Helper()
	labels := map[string]bool{}
	for _, attrs := range known {
		for key := range attrs {
			labels["resilience_"+key] = true
		}
	}
	for _, s := range selector.FindAllStringSubmatch(query, -1) {
		metrics := []string{s[1]}
		matchers := matcher.FindAllStringSubmatch(s[2], -1)
		if s[1] == "" {
			require.Equal(t, "__name__", matchers[0][1], query)
			metrics = nil
			for name := range known {
				if regexp.MustCompile("^(?:" + matchers[0][3] + ")$").MatchString(name) {
					metrics = append(metrics, name)
				}
			}
			require.Len(t, metrics, 2, "%s: of a policy and of a member", query)
			matchers = matchers[1:]
		}
		for _, metric := range metrics {
			require.Contains(t, known, metric, query)
			for _, m := range matchers {
				key, isOurs := strings.CutPrefix(m[1], "resilience_")
				if !isOurs {
					require.Contains(t, []string{"job", "instance"}, m[1], query)
					continue
				}
				require.Contains(t, known[metric], key, "%s has no such attribute: %s", metric, query)
				all := known[metric][key]
				for _, value := range strings.Split(m[3], "|") {
					require.True(t, len(all) == 0 || all[value], "%s of %s is never %q: %s", key, metric, value, query)
				}
			}
		}
	}
	for _, word := range words.FindAllString(selector.ReplaceAllString(query, "$1"), -1) {
		_, isMetric := known[word]
		require.True(t, isMetric || labels[word], "%s: %s", word, query)
	}
}

// The alerts use the metrics, attributes and values of the registry.
func TestAlertsUseRegistryNames(t *testing.T) {
	known := inPrometheus(t)
	rules := readDoc(t, "alerts/resilience.rules.yml")
	queries := regexp.MustCompile(`(?s)expr: \|\n(.*?)\n        (?:for|keep_firing_for):`).FindAllStringSubmatch(rules, -1)
	require.Len(t, queries, 12)
	for _, q := range queries {
		checkQuery(t, known, q[1])
	}
	for _, summary := range regexp.MustCompile(`summary: .*`).FindAllString(rules, -1) {
		checkQuery(t, known, strings.NewReplacer("{{", "", "}}", "").Replace(summary))
	}
}

// The dashboard uses the metrics, attributes and values of the registry. A legend has only labels of its query.
func TestDashboardUsesRegistryNames(t *testing.T) {
	known := inPrometheus(t)
	var board struct {
		Panels []struct {
			Title, Description string
			Targets            []struct{ Expr, LegendFormat string }
		}
		Templating struct{ List []struct{ Query any } }
	}
	require.NoError(t, json.Unmarshal([]byte(readDoc(t, "dashboards/resilience.json")), &board))
	queries := 0
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			queries++
			expr := strings.NewReplacer("$job", "", "$name", "", "$__rate_interval", "1m").Replace(target.Expr)
			checkQuery(t, known, expr)
			by := regexp.MustCompile(`by \(([^)]*)\)`).FindStringSubmatch(expr)
			require.NotNil(t, by, p.Title)
			for _, label := range words.FindAllString(target.LegendFormat, -1) {
				require.Contains(t, strings.Split(by[1], ", "), label, "%s: %s", p.Title, target.LegendFormat)
			}
		}
		if _, heading, found := strings.Cut(p.Description, "Runbook: "); found {
			heading = strings.TrimSuffix(strings.ToUpper(heading[:1])+heading[1:], ".")
			require.Contains(t, readDoc(t, "../docs/runbook.md"), "\n## "+heading+"\n", p.Title)
		}
	}
	require.Greater(t, queries, 40)
}

// The console computes its rates from the metrics of the registry.
func TestConsoleUsesRegistryNames(t *testing.T) {
	known := namesOf(t)
	rules := regexp.MustCompile(`metricsNamed\("([^"]+)"((?:, "\w+")*)\)`).FindAllStringSubmatch(
		readDoc(t, "../console/rules.go"), -1)
	require.Greater(t, len(rules), 9)
	for _, r := range rules {
		require.Contains(t, known, r[1]+" counter")
		for _, outcome := range regexp.MustCompile(`\w+`).FindAllString(r[2], -1) {
			all := known[r[1]+" counter"]["outcome"]
			require.True(t, all[outcome] || len(all) == 0, "%s: %s", r[1], outcome)
		}
	}
}

// Pages name the metrics, attributes and values of the registry.
func TestPagesUseRegistryNames(t *testing.T) {
	known := namesOf(t)
	kinds, attributes := values{}, map[string]values{}
	for name, attrs := range known {
		kind, _, _ := strings.Cut(name, ".")
		kinds[kind] = true
		for key, all := range attrs {
			if attributes[key] == nil {
				attributes[key] = values{}
			}
			for value := range all {
				attributes[key][value] = true
			}
		}
	}
	var pages []string
	for _, pattern := range []string{"../*.md", "../docs/*.md", "../docs/*/*.md"} {
		found, err := filepath.Glob(pattern)
		require.NoError(t, err)
		pages = append(pages, found...)
	}
	require.Greater(t, len(pages), 10)
	name := regexp.MustCompile("`([a-z]+)((?:\\.[a-z_]+)+)`")
	value := regexp.MustCompile("`([a-z]+)=\"([a-z_]+)\"`")
	histograms := instruments(t)
	counted := 0
	for _, page := range pages {
		data, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range name.FindAllStringSubmatch(string(data), -1) {
			if !kinds[m[1]] || slices.Contains([]string{".go", ".md", ".sh"}, filepath.Ext(m[2])) {
				continue
			}
			counted++
			metric := m[1] + m[2]
			units := slices.ContainsFunc([]string{"", "_seconds", "_ratio"}, func(unit string) bool {
				return known[metric+unit] != nil || known[metric+unit+" counter"] != nil
			})
			require.True(t, units || histograms["resilience."+metric], "%s: %s", page, metric)
		}
		for _, m := range value.FindAllStringSubmatch(string(data), -1) {
			if all, ok := attributes[m[1]]; ok {
				require.True(t, len(all) == 0 || all[m[2]], "%s: %s", page, m[0])
			}
		}
	}
	require.Greater(t, counted, 20)
}
