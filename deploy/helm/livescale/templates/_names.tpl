{{- define "livescale.labels" -}}
app.kubernetes.io/name: livescale
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Of both heads. */}}
{{- define "livescale.headLabels" -}}
{{ include "livescale.labels" . }}
livescale-head: "true"
{{- end }}

{{- define "livescale.pod" -}}
# Variables of services may be named LIVESCALE_…, as settings are.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "livescale.image" -}}
image: {{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "livescale.token" -}}
name: token
secret:
  secretName: {{ .Values.token.secretName }}
  defaultMode: 0400
  items:
    - {key: {{ quote .Values.token.key }}, path: token}
{{- end }}
