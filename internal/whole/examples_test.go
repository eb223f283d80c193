package whole_test

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// exampled are the packages of which each constructor, and each function that a program calls first, has a runnable
// example, by the names of the examples. An example without an Output comment is compiled and not run.
var exampled = map[string][]string{
	".": {
		"", "Do", "Chain", "Timeout", "NamedTimeout", "Fallback", "Answer", "Refused", "ContextErr", "NewGroup",
		"Group_Do", "Group_By", "Group_Get", "Group_Describe", "BeginWork", "AtEnd", "ResultOf",
	},
	"retry": {
		"", "New", "Retrier_Wrap", "Retrier_Do", "Retrier_Update", "Retrier_Observe", "Error", "Permanent", "Budget",
		"Budget_group", "Fresh", "Config_delay", "AttemptFrom", "NewBudget", "Exponential",
	},
	"hedge": {"Hedger_Do", "New", "Hedger_Observe"},
	"breaker": {
		"", "New", "Breaker_Do", "Breaker_Wrap", "Breaker_Observe", "Config_classify", "Config_patience",
		"Breaker_Begin", "Breaker_ForceOpen",
	},
	"bulkhead": {
		"", "New", "Bulkhead_Do", "Bulkhead_Wrap", "Config_share", "Bulkhead_Observe", "Bulkhead_Begin",
		"Config_priority", "Config_cost", "Bulkhead_Update",
	},
	"bulkhead/adaptive": {"", "New", "Bulkhead_Do", "Bulkhead_Wrap"},
	"throttle": {
		"", "New", "New_limitOfZero", "Limiter_Do", "Limiter_Wrap", "Limiter_Reserve", "NewGroup", "Group_Do",
		"Group_By", "All", "Limits_Do", "Limits_Wrap", "BillingMonth", "Window",
	},
	"throttle/fleet":        {"", "New", "Limits_Do", "Limits_Wrap", "Limits_Close"},
	"throttle/adaptive":     {"", "New", "Throttle_Do", "Throttle_Wrap"},
	"cacheaside":            {"", "Config_staleIfError", "New", "Cache_Get", "Cache_Observe", "Cache_GetMany"},
	"cacheaside/redisstore": {"New"},
	"lease": {
		"New", "Candidate_Run", "Candidate_Loop", "Candidate_Every", "Daily", "Interval", "Candidate_TryCampaign",
		"Candidate_Campaign", "Candidate_Observe", "Term_Epoch", "Record_Held",
	},
	"lease/sqllease":   {"New", "Store_Schema"},
	"lease/redislease": {"New"},
	"registry": {
		"", "New", "Registry_Add", "Registry_Get", "Registry_Observe", "Log", "Registry_Apply", "Registry_Preview",
		"Registry_Reload", "Entry_Settings", "Entry_Worst",
	},
	"policy": {"Describer", "Metrics", "Metric_Parse"},
	"faults": {"New", "Transport", "Handler", "Func"},
	"resiliencehttp": {
		"ClientTransport_Policies", "Transport", "NewClient", "NewTransport", "ClientTransport_RoundTrip",
		"Transport_RoundTrip", "Failover", "Server_Bulkhead", "Server_ThrottleBy", "Server_Refuse", "Health",
	},
	"resiliencesql": {""},
	"resiliencegrpc": {
		"Client", "Client_streams", "Client_DialOptions", "ReportFailure", "Idempotent", "MethodOf", "Server",
		"Server_Options", "ClientIP",
	},
	"resiliencek8s":   {"New"},
	"resilienceetcd":  {"New"},
	"resilienceotel":  {"New", "Observe", "Steps"},
	"resilienceredis": {""},
	"resiliencepgx":   {""},
	"console":         {"New"},
	"saga": {
		"", "Run", "NewRunner", "NewMemory", "Register", "Handle_Start", "Handle_Result", "Handle_Get", "Handle_Signal",
		"Handle_Cancel", "Runner_Operate", "Runner_Observe", "Runner_List", "Runner_History", "ChildOf", "ChildrenOf",
		"Exponential", "WithCommand", "Definition_Decide", "Step_middleware", "Step_await", "Step_parallel",
		"Declined", "IsDeclined", "Permanent", "MaybeApplied", "Error", "Saga", "Runner_Operate_abandon",
	},
	"saga/sqlstore":           {"New", "Store_Schema"},
	"saga/sagahttp":           {"Send", "Result", "Handler"},
	"saga/sagatest":           {"Check"},
	"resiliencegrpc/sagagrpc": {"Send", "Context", "Error", "Result"},
	"sagatemporal":            {"New"},
}

func TestPackagesHaveExamples(t *testing.T) {
	for dir, want := range exampled {
		files, err := filepath.Glob(filepath.Join("../..", dir, "*_test.go"))
		require.NoError(t, err)
		fset, found := token.NewFileSet(), map[string]bool{}
		for _, name := range files {
			file, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
			require.NoError(t, err)
			for _, e := range doc.Examples([]*ast.File{file}...) {
				found[e.Name] = found[e.Name] || e.Output != "" || e.EmptyOutput
			}
		}
		for _, name := range want {
			require.True(t, found[name], "package %s has no example with an output: %s", dir,
				strings.TrimSuffix("Example"+name, "_"))
		}
		for name, runs := range found {
			require.True(t, runs, "package %s: Example%s has no output", dir, name)
		}
	}
}
